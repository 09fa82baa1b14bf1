#pragma once

#include <atomic>
#include <chrono>

#include "absl/functional/function_ref.h"
#include "gpipe/runtime/mutex.h"

namespace gpipe {

/// Lets threads wait until something that other threads bring about is so, where neither side should pay for a lock
/// when nobody needs to sleep (an eventcount). Conditions read sequentially consistent atomics and nothing else;
/// whoever changes those calls announce() afterwards.
///
/// Invariants:
///   1. a waiter counts as a sleeper before it looks at the condition for the last time, and announce() looks for
///      sleepers after the change: one of them sees the other;
///   2. a sleeper holds the mutex from that look until it sleeps, and announce() takes it before it wakes, so that no
///      wake-up falls between.
class EventCount {
 public:
  /// Returns when the condition holds. Looks up to `spins` times, a pause apart, before it sleeps. On a core of its own
  /// spinning is far quicker than being woken. On a shared core it delays the thread we wait for, so it yields now and
  /// then.
  void await(int spins, absl::FunctionRef<bool()> condition);

  /// The same, but sleeps for so long at most: whether the condition holds.
  bool await_for(int spins, std::chrono::milliseconds time, absl::FunctionRef<bool()> condition);

  void announce();

 private:
  std::atomic<int> sleepers_ = 0;
  Mutex mutex_;
  CondVar changed_;
};

/// Spins for about half a millisecond, which bridges the waits of cells of unequal length. None where so many busy
/// threads do not have a core each: the process may run on too few cores, or may use less CPU time than that.
/// `cpu_quota` is the CPU time in CPUs.
int spins_for(int threads, double cpu_quota);

}  // namespace gpipe
