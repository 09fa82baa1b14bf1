#include "examples/common/interrupt.h"

#include <csignal>

namespace gpipe::examples {
namespace {

volatile std::sig_atomic_t recorded = 0;

// A job that was started with a signal ignored continues to ignore it.
void handle(int signal, void (*handler)(int)) {
  if (std::signal(signal, handler) == SIG_IGN) std::signal(signal, SIG_IGN);
}

void handle_both(void (*handler)(int)) {
  handle(SIGINT, handler);
  handle(SIGTERM, handler);
}

void record_first(int signal) {
  recorded = signal;
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

void record(int signal) {
  if (recorded == 0) recorded = signal;
}

}  // namespace

Interrupt::Interrupt(Second second) {
  recorded = 0;
  handle_both(second == Second::kEnds ? record_first : record);
}

// After a signal that was recorded, the program is about to end: what was ignored stays so.
Interrupt::~Interrupt() {
  if (recorded == 0) handle_both(SIG_DFL);
}

int Interrupt::signal() const { return recorded; }

}  // namespace gpipe::examples
