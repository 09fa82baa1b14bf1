#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "examples/common/image.h"
#include "examples/unet/carvana.h"
#include "gpipe/runtime/mutex.h"

namespace gpipe::examples::unet {

struct Batch {
  at::Tensor images;  ///< [n, 3, height, width], float, 0 to 1
  at::Tensor masks;   ///< [n, 1, height, width], uint8, the class of each pixel
};

struct LoaderOptions {
  int64_t batch_size = 4;
  int workers = 2;       ///< threads that decode ahead; 0: next() decodes
  int classes = 2;       ///< see classes.h
  bool augment = false;  ///< see augment(); differently in each epoch
  bool shuffle = false;  ///< else in the order of the samples
  uint64_t seed = 0;     ///< with the epoch, fixes the shuffled order
  int64_t epoch = 0;
  int64_t first_batch = 0;  ///< those before it are passed over
};

/// One pass over the samples in batches (the last may be smaller), decoded ahead of their use by worker threads. What
/// it yields does not depend on the number of workers, nor on which batch is the first. It holds at most workers + 1
/// batches, decoded or being decoded.
///
/// All samples come out at one size, whatever theirs (see image_size() and scaled()): images by resize_bilinear(),
/// masks by resize_nearest(). Another aspect ratio is stretched. A sample without a mask gets one of zeros.
///
/// Threads: next() from one thread at a time. Destroy it at any time; it waits for the files being decoded, no more.
class Loader {
 public:
  /// Throws std::invalid_argument for an empty list, size or batch, or a negative number of workers.
  Loader(std::vector<Sample> samples, Size size, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The next batch, or nothing at the end. Where a file of that batch cannot be decoded, rethrows what the reader
  /// threw, and so does every call after it.
  std::optional<Batch> next();

  /// That next() returns in all.
  int64_t batches() const { return std::max<int64_t>(0, end_ - options_.first_batch); }

 private:
  struct Result {
    Batch batch;
    std::exception_ptr error;
  };

  void work(std::stop_token stop);
  // Incomplete when it was told to stop.
  Batch decode(int64_t index, const std::stop_token& stop) const;

  std::vector<Sample> samples_;  // in the order of this pass
  const Size size_;
  const LoaderOptions options_;
  const int64_t end_;  // the batch after the last

  Mutex mutex_;
  CondVar changed_;
  std::map<int64_t, Result> results_ ABSL_GUARDED_BY(mutex_);
  int64_t claimed_ ABSL_GUARDED_BY(mutex_);  // the next batch that a worker will begin
  int64_t taken_ ABSL_GUARDED_BY(mutex_);    // the next batch that next() will return

  // The last member: its destruction joins the workers while what they use is alive.
  std::vector<std::jthread> workers_;
};

}  // namespace gpipe::examples::unet
