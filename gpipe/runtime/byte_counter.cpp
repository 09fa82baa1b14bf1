#include "gpipe/runtime/byte_counter.h"

#include <algorithm>

namespace gpipe {

using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

namespace {

/// Pipelines may stand in one another: the innermost counts.
thread_local const ByteCounter::Worker* worker_of_this_thread = nullptr;

}  // namespace

ByteCounter::Worker::Worker(const ByteCounter* counter, int worker)
    : outer_(worker_of_this_thread), counter_(counter), worker_(worker) {
  worker_of_this_thread = this;
}

ByteCounter::Worker::~Worker() { worker_of_this_thread = outer_; }

ByteCounter::ByteCounter(int workers)
    : ProfilerStateBase(
          ProfilerConfig(ProfilerState::Disabled, /*report_input_shapes=*/false, /*profile_memory=*/true)),
      counts_(workers) {}

torch::profiler::impl::ActiveProfilerType ByteCounter::profilerType() {
  return torch::profiler::impl::ActiveProfilerType::NONE;
}

Bytes ByteCounter::count(int worker) {
  MutexLock lock(mutex_);
  auto& count = counts_[worker];
  const auto result = count;
  count.peak = count.live;
  return result;
}

void ByteCounter::release(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage()) remove(tensor.storage().data());
}

void ByteCounter::reportMemoryUsage(void* data, std::int64_t bytes, std::size_t, std::size_t, c10::Device) {
  if (bytes < 0) return remove(data);
  if (worker_of_this_thread == nullptr || worker_of_this_thread->counter_ != this) return;
  const int worker = worker_of_this_thread->worker_;
  MutexLock lock(mutex_);
  auto& block = blocks_.try_emplace(data, Block{worker, 0}).first->second;
  counts_[block.worker].live -= block.bytes;  // of one that was freed unheard, and has its address
  block = {worker, bytes};
  auto& count = counts_[worker];
  count.live += bytes;
  count.peak = std::max(count.peak, count.live);
}

void ByteCounter::remove(const void* data) {
  MutexLock lock(mutex_);
  const auto found = blocks_.find(data);
  if (found == blocks_.end()) return;
  counts_[found->second.worker].live -= found->second.bytes;
  blocks_.erase(found);
}

}  // namespace gpipe
