#pragma once

#include "absl/container/flat_hash_map.h"
#include "gpipe/base/mutex.h"
#include "gpipe/runtime/executor.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {

/// Receives reports of allocations and freeings of tensor memory, on all devices, from PyTorch's allocators: on threads
/// on which it is installed, and on those that take over such a thread's at::ThreadLocalState.
///
/// PyTorch has one slot per thread for a profiler and casts its content to ProfilerStateBase.
///
/// Thread safety: allocated() and freed() are called on several threads at once.
class AllocationListener : public torch::profiler::impl::ProfilerStateBase {
 public:
  /// Installs a listener on this thread for a scope, unless it is null or the thread has another one, or a profiler.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<AllocationListener> listener) {
      if (listener) install(std::move(listener));
    }
    bool installed() const { return guard_.has_value(); }

   private:
    void install(std::shared_ptr<AllocationListener> listener);
    std::optional<c10::DebugInfoGuard> guard_;
  };

  AllocationListener();

  void reportMemoryUsage(void* data, std::int64_t bytes, std::size_t, std::size_t, c10::Device) final;
  torch::profiler::impl::ActiveProfilerType profilerType() final;

 private:
  /// `bytes` > 0. An earlier block at this address may have been freed without a report.
  virtual void allocated(const void* data, std::int64_t bytes) = 0;
  /// `bytes` > 0. The allocation may not have been reported.
  virtual void freed(const void* data, std::int64_t bytes) = 0;
};

/// Counts the bytes of live tensors per worker that allocated them, on all devices. Thread-safe.
class ByteCounter : public AllocationListener {
 public:
  explicit ByteCounter(int workers) : counts_(workers) {}

  /// Assigns this thread's allocations to a worker for a scope. Allocations of threads without a worker are not
  /// counted. Scopes of nested pipelines nest: the innermost counts.
  class Worker {
   public:
    Worker(const ByteCounter* counter, int worker);
    ~Worker();
    Worker(const Worker&) = delete;

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
