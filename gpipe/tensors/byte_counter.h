#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "gpipe/base/mutex.h"
#include "gpipe/runtime/action_runner.h"
#include "gpipe/tensors/allocation_listener.h"

namespace gpipe {

/// Counts the bytes of live tensors per worker that allocated them, on all devices. Thread-safe.
class ByteCounter : public AllocationListener {
 public:
  explicit ByteCounter(int workers) : counts_(workers) {}

  /// Assigns this thread's allocations to a worker for a scope. Allocations of threads without a worker are not
  /// counted. The counter may be null. Scopes of nested pipelines nest: the innermost counts.
  class Worker {
   public:
    Worker(const ByteCounter* counter, int worker);
    ~Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

   private:
    friend class ByteCounter;
    const Worker* const outer_;
    const ByteCounter* const counter_;
    const int worker_;
  };

  /// Returns the worker's live bytes, and their peak since the last call.
  Bytes count(int worker);

  /// Stops counting the tensor's memory: it now belongs to the pipeline's caller.
  void release(const at::Tensor& tensor);

 private:
  struct Block {
    int worker;
    std::int64_t bytes;
  };
  void allocated(const void* data, std::int64_t bytes) override;
  void freed(const void* data, std::int64_t) override { remove(data); }
  void remove(const void* data);

  Mutex mutex_;
  absl::flat_hash_map<const void*, Block> blocks_ ABSL_GUARDED_BY(mutex_);
  std::vector<Bytes> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gpipe
