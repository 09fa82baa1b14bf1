#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gpipe/base/mutex.h"

namespace gpipe {

/// Lets threads wait for a condition that other threads make true. Takes no lock unless a thread sleeps (an
/// eventcount). Thread-safe. REQUIRES: a condition reads only sequentially consistent atomics, and a thread that
/// changes one of them calls announce() afterwards.
///
/// Invariants:
///   1. A waiter increments sleepers_ before it checks the condition for the last time. announce() reads sleepers_
///      after the change. So the waiter sees the change, or announce() sees the waiter.
///   2. A waiter holds the mutex from that check until it sleeps. announce() takes the mutex before it wakes sleepers.
///      So no wake-up is lost in between.
class EventCount {
 public:
  /// Returns when the condition holds. Checks it up to `spins` times before it sleeps.
  void await(int spins, absl::FunctionRef<bool()> condition);

  /// The same, but sleeps for at most `time`. Returns whether the condition holds.
  bool await_for(int spins, std::chrono::milliseconds time, absl::FunctionRef<bool()> condition);

  /// Wakes the sleepers, which check their conditions again.
  void announce();

 private:
  std::atomic<int> sleepers_ = 0;
  Mutex mutex_;
  CondVar changed_;
};

/// Returns the file's text, or std::nullopt if the file does not exist.
using ReadFile = std::function<std::optional<std::string>(const std::string& path)>;

/// Returns the CPU time that control groups, of version 1 or 2, allow this process, in CPUs: 1.5 means 1.5 seconds of
/// CPU time per second. Takes the minimum over the process's group and its ancestors. Missing and malformed files count
/// as no limit, which is infinity. Thread-safe.
double cpu_quota();

/// The same, but reads files with `read`.
double cpu_quota(const ReadFile& read);

/// Returns how often to spin before sleeping: enough for about half a millisecond, or 0 if the process has fewer cores
/// than `threads`, the number of busy threads, or a `cpu_quota` (in CPUs) below it.
int spins_for(int threads, double cpu_quota);

/// One direction of one edge during one run: tracks which micro-batches have been put. It carries no data: the producer
/// writes them before put(), which happens before take(), and the consumer reads them after that. A micro-batch is put
/// once and taken once.
///
/// Thread safety: one producer thread puts, one consumer thread takes (they can be the same), any thread cancels.
class Channel {
 public:
  /// REQUIRES: micro_batches >= 1. `spins`: see EventCount::await().
  explicit Channel(int micro_batches, int spins = 0);

  void put(int micro_batch);
  /// Waits until the micro-batch has been put. Returns false if cancelled.
  bool take(int micro_batch);
  /// From then on no call waits, and take() returns false.
  void cancel();

 private:
  const int spins_;
  std::vector<std::atomic<bool>> present_;
  std::atomic<bool> cancelled_ = false;
  EventCount changed_;
};

}  // namespace gpipe
