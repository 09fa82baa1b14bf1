#include "gpipe/tensors/byte_counter.h"

#include <algorithm>

namespace gpipe {

using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

void AllocationListener::Scope::install(std::shared_ptr<AllocationListener> listener) {
  const auto kind = c10::DebugInfoKind::PROFILER_STATE;
  if (c10::ThreadLocalDebugInfo::get(kind) == nullptr) guard_.emplace(kind, std::move(listener));
}

AllocationListener::AllocationListener()
    : ProfilerStateBase(
          ProfilerConfig(ProfilerState::Disabled, /*report_input_shapes=*/false, /*profile_memory=*/true)) {}

void AllocationListener::reportMemoryUsage(void* data, std::int64_t bytes, std::size_t, std::size_t, c10::Device) {
  if (bytes > 0) allocated(data, bytes);
  if (bytes < 0) freed(data, -bytes);
}

ActiveProfilerType AllocationListener::profilerType() { return ActiveProfilerType::NONE; }

namespace {

thread_local const ByteCounter::Worker* worker_of_this_thread = nullptr;

}  // namespace

ByteCounter::Worker::Worker(const ByteCounter* counter, int worker)
    : outer_(worker_of_this_thread), counter_(counter), worker_(worker) {
  worker_of_this_thread = this;
}

ByteCounter::Worker::~Worker() { worker_of_this_thread = outer_; }

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

void ByteCounter::allocated(const void* data, std::int64_t bytes) {
  if (worker_of_this_thread == nullptr || worker_of_this_thread->counter_ != this) return;
  const int worker = worker_of_this_thread->worker_;
  MutexLock lock(mutex_);
  auto& block = blocks_.try_emplace(data, Block{worker, 0}).first->second;
  counts_[block.worker].live -= block.bytes;  // an earlier block at this address, whose freeing was not reported
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
