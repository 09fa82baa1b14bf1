#pragma once

#include <atomic>
#include <vector>

#include "gpipe/runtime/event_count.h"

namespace gpipe {

/// One direction of one edge during one run: says which micro-batches have been put and not yet taken. It carries no
/// data; whoever puts has written the data before, whoever takes may read it after (a put happens before its take).
///
/// Thread safety: put by one producer thread, taken by one consumer thread (they may be the same), cancelled by any.
/// Invariants:
///   1. at most `capacity` micro-batches are put and not taken;
///   2. a micro-batch is put once and taken once;
///   3. after cancel() nobody waits, and every later call returns false.
class Channel {
 public:
  /// capacity >= 1, micro_batches >= 1; `spins` before it sleeps: see EventCount.
  Channel(int capacity, int micro_batches, int spins = 0);

  /// Waits while the channel is full. Returns false when cancelled.
  bool put(int micro_batch);
  /// Waits until that micro-batch has been put. Returns false when cancelled.
  bool take(int micro_batch);
  void cancel();

 private:
  const int capacity_;
  const int spins_;
  std::atomic<int> held_ = 0;
  std::vector<std::atomic<bool>> present_;
  std::atomic<bool> cancelled_ = false;
  EventCount changed_;
};

}  // namespace gpipe
