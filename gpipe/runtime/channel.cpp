#include "gpipe/runtime/channel.h"

#include <sched.h>

#include <cassert>

namespace gpipe {
namespace {

constexpr int kSpins = 20000;
constexpr int kSpinsPerYield = 128;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool spin(int spins, absl::FunctionRef<bool()> condition) {
  if (condition()) return true;
  for (; spins > 0; --spins) {
    spins % kSpinsPerYield == 0 ? static_cast<void>(sched_yield()) : pause();
    if (condition()) return true;
  }
  return false;
}

}  // namespace

void EventCount::await(int spins, absl::FunctionRef<bool()> condition) {
  if (spin(spins, condition)) return;
  MutexLock lock(mutex_);
  ++sleepers_;
  while (!condition()) changed_.wait(mutex_);
  --sleepers_;
}

bool EventCount::await_for(int spins, std::chrono::milliseconds time, absl::FunctionRef<bool()> condition) {
  if (spin(spins, condition)) return true;
  const auto end = std::chrono::steady_clock::now() + time;
  MutexLock lock(mutex_);
  ++sleepers_;
  bool holds = condition();
  for (; !holds && std::chrono::steady_clock::now() < end; holds = condition()) changed_.wait_until(mutex_, end);
  --sleepers_;
  return holds;
}

void EventCount::announce() {
  if (sleepers_ == 0) return;
  { MutexLock lock(mutex_); }
  changed_.notify_all();  // not under the mutex, because a woken thread locks it
}

int spins_for(int threads, double cpu_quota) {
  cpu_set_t cores;
  // Fails if there are more cores than cpu_set_t can hold.
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 0;
  return threads <= CPU_COUNT(&cores) && threads <= cpu_quota ? kSpins : 0;
}

Channel::Channel(int micro_batches, int spins) : spins_(spins), present_(micro_batches) {}

void Channel::put(int micro_batch) {
  assert(!present_[micro_batch]);
  present_[micro_batch] = true;
  changed_.announce();
}

bool Channel::take(int micro_batch) {
  changed_.await(spins_, [&] { return present_[micro_batch] || cancelled_; });
  return !cancelled_;
}

void Channel::cancel() {
  cancelled_ = true;
  changed_.announce();
}

}  // namespace gpipe
