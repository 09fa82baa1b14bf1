#include "gpipe/runtime/event.h"

#include <sched.h>

namespace gpipe {
namespace {

constexpr int kSpins = 20000;
constexpr int kSpinsAYield = 128;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void Event::await(int spins, absl::FunctionRef<bool()> condition) {
  if (condition()) return;
  for (; spins > 0; --spins) {
    spins % kSpinsAYield == 0 ? static_cast<void>(sched_yield()) : pause();
    if (condition()) return;
  }
  MutexLock lock(mutex_);
  ++sleepers_;
  while (!condition()) changed_.wait(mutex_);
  --sleepers_;
}

void Event::announce() {
  if (sleepers_ == 0) return;
  { MutexLock lock(mutex_); }
  changed_.notify_all();  // without the mutex, which the woken thread will take
}

int spins_for(int threads) {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 0;  // more cores than the set can tell
  return threads <= CPU_COUNT(&cores) ? kSpins : 0;
}

}  // namespace gpipe
