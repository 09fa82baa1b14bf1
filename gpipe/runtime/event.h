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
class Event {
 public:
  /// Returns when the condition holds. Looks up to `spins` times, a pause apart, before it sleeps: on a core of its own
  /// that is far quicker than to be woken, on a shared one it keeps away the thread that is waited for; so it yields
  /// now and then, for whoever else may have been put on its core.
  void await(int spins, absl::FunctionRef<bool()> condition);

  /// The same, but sleeps for so long at most: whether the condition holds.
  bool await_for(int spins, std::chrono::milliseconds time, absl::FunctionRef<bool()> condition);

  void announce();

 private:
  std::atomic<int> sleepers_ = 0;
  Mutex mutex_;
  CondVar changed_;
};

/// Spins enough to bridge what cells of unequal length make each other wait, about half a millisecond, if this process
/// has a core for each of so many busy threads; else none.
int spins_for(int threads);

}  // namespace gpipe
