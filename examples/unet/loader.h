#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "examples/common/image.h"
#include "examples/unet/carvana.h"
#include "gpipe/base/mutex.h"
#include "gpipe/ranks.h"

namespace gpipe::examples::unet {

struct Batch {
  at::Tensor images;  ///< [n, 3, height, width], float, 0 to 1
  at::Tensor masks;   ///< [n, 1, height, width], uint8, the class of each pixel
};

struct LoaderOptions {
  int64_t batch_size = 4;
  int workers = 2;       ///< threads that decode in advance; 0: next() decodes
  int classes = 2;       ///< see classes.h
  bool augment = false;  ///< see augment(); each epoch differs
  bool shuffle = false;  ///< otherwise in the order of the samples
  uint64_t seed = 0;     ///< determines the shuffled order, together with the epoch
  int64_t epoch = 0;
  int64_t first_batch = 0;                 ///< earlier ones are skipped
  std::shared_ptr<Ranks> ranks = nullptr;  ///< only the part of each batch that belongs to this replica
};

/// One pass over the samples in batches, decoded in advance by worker threads. The last batch can be smaller; a part can be
/// empty. A batch
/// does not depend on the number of workers, nor on first_batch. At most workers + 1 batches are decoded or being
/// decoded at a time.
///
/// All samples are resized to one size: images by resize_bilinear(), masks by resize_nearest(). Other aspect ratios are
/// stretched. A sample without a mask gets a mask of zeros.
///
/// Thread safety: call next() from one thread at a time. The destructor can run at any time; it waits only for the files that
/// are being decoded.
class Loader {
 public:
  /// Errors: std::invalid_argument for an empty list, size or batch, or a negative number of workers.
  Loader(std::vector<Sample> samples, Size size, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The next batch, or std::nullopt at the end. If a file of the batch cannot be decoded, rethrows the reader's
  /// exception; so do all later calls.
  std::optional<Batch> next();

  /// The number of batches that next() returns in total.
  int64_t batches() const { return std::max<int64_t>(0, end_ - options_.first_batch); }

 private:
  struct Result {
    Batch batch;
    std::exception_ptr error;
  };

  void work(std::stop_token stop);
  // The batch is incomplete if `stop` was requested.
  Batch decode(int64_t index, const std::stop_token& stop) const;

  std::vector<Sample> samples_;  // in the order of this pass
  const Size size_;
  const LoaderOptions options_;
  const int64_t end_;  // one past the last batch

  Mutex mutex_;
  CondVar changed_;
  std::map<int64_t, Result> results_ ABSL_GUARDED_BY(mutex_);
  int64_t claimed_ ABSL_GUARDED_BY(mutex_);  // the next batch that a worker begins
  int64_t taken_ ABSL_GUARDED_BY(mutex_);    // the next batch that next() returns

  // The last member, so that its destructor joins the workers before the members that they use are destroyed.
  std::vector<std::jthread> workers_;
};

}  // namespace gpipe::examples::unet
