#pragma once

#include <vector>

#include "gpipe/base/mutex.h"

namespace gpipe {

/// One direction of one edge during one run: tracks which micro-batches have been put. It carries no data: the producer
/// writes them before put(), which happens before take(), and the consumer reads them after that. A micro-batch is put
/// once and taken once.
///
/// Thread safety: one producer thread puts, one consumer thread takes (they can be the same), any thread cancels.
class Channel {
 public:
  /// REQUIRES: micro_batches >= 1.
  explicit Channel(int micro_batches) : present_(micro_batches) {}

  void put(int micro_batch);
  /// Waits until the micro-batch has been put. Returns false if cancelled.
  bool take(int micro_batch);
  /// From then on no call waits, and take() returns false.
  void cancel();

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<bool> present_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace gpipe
