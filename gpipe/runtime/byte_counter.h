#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "gpipe/runtime/cells.h"
#include "gpipe/runtime/mutex.h"

namespace gpipe {

/// Counts the bytes of tensors that each worker has allocated, on whatever device, and that nobody has freed yet. It
/// hears of them from PyTorch's allocators on every thread on which it is installed as the PROFILER_STATE of
/// c10::DebugInfoGuard, and on those that take over such a thread's at::ThreadLocalState. Thread-safe.
class ByteCounter : public torch::profiler::impl::ProfilerStateBase {  // for which PyTorch takes whatever is there
 public:
  explicit ByteCounter(int workers);

  /// For its lifetime, what this thread allocates is that worker's. What others allocate is nobody's. The counter may
  /// be null.
  class Worker {
   public:
    Worker(const ByteCounter* counter, int worker);
    ~Worker();
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

   private:
    const Worker* const outer_;
    friend class ByteCounter;
    const ByteCounter* const counter_;
    const int worker_;
  };

  /// The worker's bytes now, and the most there have been at once since the last call.
  Bytes count(int worker);

  /// The tensor's memory is the caller's from now on, and no longer counted.
  void release(const at::Tensor& tensor);

  void reportMemoryUsage(void* data, std::int64_t bytes, std::size_t, std::size_t, c10::Device) override;
  torch::profiler::impl::ActiveProfilerType profilerType() override;

 private:
  struct Block {
    int worker;
    std::int64_t bytes;
  };
  void remove(const void* data);

  Mutex mutex_;
  absl::flat_hash_map<const void*, Block> blocks_ ABSL_GUARDED_BY(mutex_);
  std::vector<Bytes> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gpipe
