#include "examples/common/interrupt.h"

#include <csignal>

namespace gpipe::examples {
namespace {

volatile std::sig_atomic_t recorded = 0;

void record(int signal) {
  recorded = signal;
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

// A job that was started with a signal ignored continues to ignore it.
void handle(int signal, void (*handler)(int)) {
  if (std::signal(signal, handler) == SIG_IGN) std::signal(signal, SIG_IGN);
}

}  // namespace

Interrupt::Interrupt() {
  recorded = 0;
  handle(SIGINT, record);
  handle(SIGTERM, record);
}

Interrupt::~Interrupt() {
  handle(SIGINT, SIG_DFL);
  handle(SIGTERM, SIG_DFL);
}

int Interrupt::signal() const { return recorded; }

}  // namespace gpipe::examples
