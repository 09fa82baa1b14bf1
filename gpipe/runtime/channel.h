#pragma once

#include <vector>

#include "gpipe/runtime/event_count.h"

namespace gpipe {

/// One direction of one edge during one run: tracks which micro-batches have been put and not yet taken. It carries no
/// data. A micro-batch's put() happens before its take(), so the producer writes the data before put() and the consumer
/// reads it after take().
///
/// Thread safety: one producer thread puts, one consumer thread takes (they can be the same), any thread cancels.
/// Invariants:
///   1. A micro-batch is put once and taken once.
///   2. After cancel(), no call waits, and take() returns false.
class Channel {
 public:
  /// REQUIRES: micro_batches >= 1. `spins`: see EventCount::await().
  explicit Channel(int micro_batches, int spins = 0);

  void put(int micro_batch);
  /// Waits until the micro-batch has been put. Returns false if cancelled.
  bool take(int micro_batch);
  /// Wakes a waiting call.
  void cancel();

 private:
  const int spins_;
  std::vector<std::atomic<bool>> present_;
  std::atomic<bool> cancelled_ = false;
  EventCount changed_;
};

}  // namespace gpipe
