#include "gpipe/tensors/kept_memory.h"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <limits>
#include <map>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "gpipe/base/mutex.h"
#include "gpipe/tensors/torch_internals.h"

C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);

namespace gpipe {
namespace {

constexpr std::size_t kSmallest = std::size_t{64} << 10;

/// PyTorch's default allocator behind a cache of freed blocks. It returns what PyTorch's returns, so each may free the
/// other's blocks. Reports to profilers like PyTorch's: a block in the cache counts as freed.
class KeepingAllocator final : public c10::Allocator {
 public:
  /// Lives as long as the process, because tensors and other allocators refer to it.
  static KeepingAllocator& instance() {
    static auto* const allocator = new KeepingAllocator;
    return *allocator;
  }

  void add_user();
  void remove_user();

  c10::DataPtr allocate(std::size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }

 private:
  using Age = std::uint64_t;
  using Blocks = std::vector<void*>;

  KeepingAllocator() { pthread_atfork(&before_fork, &after_fork, &in_child); }

  static void give_back(void* block);
  static void before_fork() ABSL_NO_THREAD_SAFETY_ANALYSIS { instance().mutex_.lock(); }
  static void after_fork() ABSL_NO_THREAD_SAFETY_ANALYSIS { instance().mutex_.unlock(); }
  static void in_child();

  /// Returns a cached block of this size, or null.
  void* take(std::size_t size);
  /// Registers a block that take() lacked.
  void add(void* block, std::size_t size);
  /// Puts a block into the cache. Returns false for an unknown one.
  bool keep(void* block);
  /// Frees the whole cache.
  void trim();

  void note_live(void* block, std::size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Empties the cache until it and live blocks take no more than `most` bytes.
  Blocks shrink(std::size_t most) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Blocks stop() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void free_all(const Blocks& blocks) { std::ranges::for_each(blocks, &c10::free_cpu); }

  c10::Allocator& default_ = *c10::GetDefaultCPUAllocator();
  Mutex mutex_;
  int users_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<const void*, std::size_t> live_ ABSL_GUARDED_BY(mutex_);  // sizes; empty without users
  std::map<Age, std::pair<std::size_t, void*>> cached_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<std::size_t, Age>> by_size_ ABSL_GUARDED_BY(mutex_);  // of the cached blocks
  Age next_age_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t live_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t cached_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t most_live_ ABSL_GUARDED_BY(mutex_) = 0;
};

void KeepingAllocator::add_user() {
  MutexLock lock(mutex_);
  ++users_;
  if (c10::GetCPUAllocator() == &default_) c10::SetCPUAllocator(this);
}

void KeepingAllocator::remove_user() {
  Blocks cached;
  {
    MutexLock lock(mutex_);
    if (users_ == 0 || --users_ > 0) return;  // 0: a forked child destroys what its parent made
    cached = stop();
  }
  free_all(cached);
}

c10::DataPtr KeepingAllocator::allocate(std::size_t size) {
  const bool fills = FLAGS_caffe2_cpu_allocator_do_junk_fill || FLAGS_caffe2_cpu_allocator_do_zero_fill;
  const bool keeps = size >= kSmallest && !fills;
  if (void* const block = keeps ? take(size) : nullptr) {
    c10::profiledCPUMemoryReporter().New(block, size);
    return {block, block, &give_back, at::kCPU};
  }
  auto block = [&] {
    try {
      return default_.allocate(size);
    } catch (const c10::Error&) {
      trim();
      return default_.allocate(size);
    }
  }();
  if (keeps && block.compare_exchange_deleter(default_.raw_deleter(), &give_back)) add(block.get(), size);
  return block;
}

void KeepingAllocator::give_back(void* block) {
  if (block == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(block);
  if (!instance().keep(block)) c10::free_cpu(block);
}

void KeepingAllocator::in_child() {
  after_fork();
  auto& allocator = instance();
  Blocks cached;
  {
    MutexLock lock(allocator.mutex_);
    allocator.users_ = 0;
    cached = allocator.stop();
  }
  free_all(cached);
}

void* KeepingAllocator::take(std::size_t size) {
  MutexLock lock(mutex_);
  auto youngest = by_size_.upper_bound({size, std::numeric_limits<Age>::max()});
  if (youngest == by_size_.begin() || (--youngest)->first != size) return nullptr;
  const auto found = cached_.find(youngest->second);
  void* const block = found->second.second;
  by_size_.erase(youngest);
  cached_.erase(found);
  cached_bytes_ -= size;
  note_live(block, size);
  return block;
}

void KeepingAllocator::add(void* block, std::size_t size) {
  Blocks surplus;
  {
    MutexLock lock(mutex_);
    if (users_ == 0) return;
    note_live(block, size);
    surplus = shrink(most_live_ + most_live_ / 4);
  }
  free_all(surplus);
}

bool KeepingAllocator::keep(void* block) {
  MutexLock lock(mutex_);
  const auto found = live_.find(block);
  if (found == live_.end()) return false;
  const auto size = found->second;
  live_.erase(found);
  live_bytes_ -= size;
  try {
    by_size_.emplace(size, next_age_);
    cached_.emplace(next_age_, std::pair(size, block));
  } catch (const std::bad_alloc&) {  // which a deleter must not throw
    by_size_.erase({size, next_age_});
    return false;
  }
  ++next_age_;
  cached_bytes_ += size;
  return true;
}

void KeepingAllocator::trim() {
  Blocks cached;
  {
    MutexLock lock(mutex_);
    cached = shrink(live_bytes_);
  }
  free_all(cached);
}

void KeepingAllocator::note_live(void* block, std::size_t size) {
  auto& known = live_[block];  // not 0 if another allocator has freed a block at this address
  live_bytes_ += size - std::exchange(known, size);
  most_live_ = std::max(most_live_, live_bytes_);
}

KeepingAllocator::Blocks KeepingAllocator::shrink(std::size_t most) {
  Blocks removed;
  while (live_bytes_ + cached_bytes_ > most) {
    const auto oldest = cached_.begin();
    const auto [size, block] = oldest->second;
    by_size_.erase({size, oldest->first});
    cached_.erase(oldest);
    cached_bytes_ -= size;
    removed.push_back(block);
  }
  return removed;
}

KeepingAllocator::Blocks KeepingAllocator::stop() {
  if (c10::GetCPUAllocator() == this) c10::SetCPUAllocator(&default_);
  auto cached = shrink(live_bytes_);
  live_.clear();
  live_bytes_ = most_live_ = 0;
  return cached;
}

}  // namespace

KeptMemory::KeptMemory() { KeepingAllocator::instance().add_user(); }

KeptMemory::~KeptMemory() { KeepingAllocator::instance().remove_user(); }

}  // namespace gpipe
