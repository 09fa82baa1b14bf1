#include "examples/common/interrupt.h"

#include <csignal>

namespace gpipe::examples {
namespace {

volatile std::sig_atomic_t noted = 0;

void note(int signal) {
  noted = signal;
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

// A job that was started to ignore a signal goes on to.
void handle(int signal, void (*handler)(int)) {
  if (std::signal(signal, handler) == SIG_IGN) std::signal(signal, SIG_IGN);
}

}  // namespace

Interrupt::Interrupt() {
  noted = 0;
  handle(SIGINT, note);
  handle(SIGTERM, note);
}

Interrupt::~Interrupt() {
  handle(SIGINT, SIG_DFL);
  handle(SIGTERM, SIG_DFL);
}

int Interrupt::signal() const { return noted; }

}  // namespace gpipe::examples
