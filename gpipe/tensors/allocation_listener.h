#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace gpipe {

/// Receives a report of each allocation and each freeing of tensor memory, on all devices, from PyTorch's allocators.
/// Reports come from each thread on which the listener is installed, and from threads that take over such a thread's
/// at::ThreadLocalState.
///
/// PyTorch has one slot per thread for a profiler and casts its content to ProfilerStateBase.
///
/// Thread safety: allocated() and freed() are called on several threads at once.
class AllocationListener : public torch::profiler::impl::ProfilerStateBase {
 public:
  /// Installs a listener on this thread for a scope. Installs nothing if the listener is null, or if the thread already
  /// has a profiler or listener, which would lose its reports.
  class Scope {
   public:
    explicit Scope(std::shared_ptr<AllocationListener> listener);

    bool installed() const { return guard_.has_value(); }

   private:
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

}  // namespace gpipe
