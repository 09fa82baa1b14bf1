#include "gpipe/runtime/byte_counter.h"

#include <algorithm>

namespace gpipe {
namespace {

constexpr int kNobody = -1;
thread_local int worker_of_this_thread = kNobody;

}  // namespace

ByteCounter::Worker::Worker(int worker) { worker_of_this_thread = worker; }
ByteCounter::Worker::~Worker() { worker_of_this_thread = kNobody; }

Bytes ByteCounter::count(int worker) {
  MutexLock lock(mutex_);
  auto& count = counts_[worker];
  const auto result = count;
  count.peak = count.live;
  return result;
}

void ByteCounter::forget(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage()) remove(tensor.storage().data());
}

void ByteCounter::reportMemoryUsage(void* data, std::int64_t bytes, std::size_t, std::size_t, c10::Device) {
  if (bytes < 0) return remove(data);
  if (worker_of_this_thread == kNobody) return;
  MutexLock lock(mutex_);
  auto& block = blocks_.try_emplace(data, Block{worker_of_this_thread, 0}).first->second;
  counts_[block.worker].live -= block.bytes;  // of one that was freed unheard, and has its address
  block = {worker_of_this_thread, bytes};
  auto& count = counts_[worker_of_this_thread];
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
