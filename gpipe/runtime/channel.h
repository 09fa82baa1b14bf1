#pragma once

#include <vector>

#include "absl/base/thread_annotations.h"
#include "gpipe/runtime/mutex.h"

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
  /// capacity >= 1, micro_batches >= 1.
  Channel(int capacity, int micro_batches);

  /// Waits while the channel is full. Returns false when cancelled.
  bool put(int micro_batch);
  /// Waits until that micro-batch has been put. Returns false when cancelled.
  bool take(int micro_batch);
  void cancel();

 private:
  Mutex mutex_;
  CondVar changed_;
  const int capacity_;
  int held_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<bool> present_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gpipe
