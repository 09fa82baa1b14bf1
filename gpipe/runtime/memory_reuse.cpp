#include "gpipe/runtime/memory_reuse.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "gpipe/runtime/mutex.h"

namespace gpipe {
namespace {

constexpr std::size_t kSmallest = std::size_t{64} << 10;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSegment = std::size_t{32} << 20;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Blocks of a size class serve each other; eight classes an octave waste a ninth at most.
std::size_t size_class(std::size_t bytes) { return round_up(bytes, std::bit_floor(bytes) / 8); }

// Blocks of at least kSmallest, cut one behind the other from segments that are never returned; all else is left to
// the allocator that was there before. Blocks are told apart by their address, because PyTorch may free what it has
// allocated raw with whatever allocator is current then.
class Pool : public c10::Allocator {
 public:
  explicit Pool(c10::Allocator* rest) : rest_(rest) {}

  void switch_on(bool on) { on_ = on; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kSmallest || !on_) return rest_->allocate(bytes);
    const bool reported = c10::memoryProfilingEnabled();
    void* data = take({bytes, reported});
    if (reported) c10::reportMemoryUsageToProfiler(data, static_cast<std::int64_t>(bytes), 0, 0, c10::kCPU);
    return {data, data, raw_deleter(), c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override;

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  void free(void* data) {
    const auto [bytes, reported] = give_back(data);
    if (bytes == 0) return rest_->raw_deallocate(data);
    if (reported) c10::reportMemoryUsageToProfiler(data, -static_cast<std::int64_t>(bytes), 0, 0, c10::kCPU);
  }

 private:
  struct Block {
    std::size_t bytes = 0;  // asked for
    bool reported = false;
  };

  void* take(Block block) {
    const auto size = size_class(block.bytes);
    MutexLock lock(mutex_);
    auto& free = free_[size];
    if (free.empty()) {
      free.reserve(++blocks_[size]);  // so that nothing can fail when they come back
      free.push_back(cut(size));
    }
    void* data = free.back();
    used_.emplace(data, block);
    free.pop_back();
    return data;
  }

  // No bytes for what is not of the pool.
  Block give_back(void* data) {
    MutexLock lock(mutex_);
    const auto found = used_.find(data);
    if (found == used_.end()) return {};
    const auto block = found->second;
    free_[size_class(block.bytes)].push_back(data);
    used_.erase(found);
    return block;
  }

  char* cut(std::size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (size > left_) {
      const auto length = round_up(std::max(size, kSegment), kHugePage);
      void* memory = mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      next_ = static_cast<char*>(memory);
      next_ += round_up(reinterpret_cast<std::uintptr_t>(memory), kHugePage) - reinterpret_cast<std::uintptr_t>(memory);
      left_ = length;
      madvise(next_, length, MADV_HUGEPAGE);  // or small pages, where that is refused
    }
    left_ -= size;
    return std::exchange(next_, next_ + size);
  }

  c10::Allocator* const rest_;
  std::atomic<bool> on_ = false;
  Mutex mutex_;
  absl::flat_hash_map<std::size_t, std::vector<void*>> free_ ABSL_GUARDED_BY(mutex_);  // by size class
  absl::flat_hash_map<std::size_t, std::size_t> blocks_ ABSL_GUARDED_BY(mutex_);       // by size class, free or used
  absl::flat_hash_map<void*, Block> used_ ABSL_GUARDED_BY(mutex_);
  char* next_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::size_t left_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The process's; never destroyed, for tensors may outlive everything.
Pool& pool() {
  static Pool* const it = [] {
    auto* made = new Pool(c10::GetCPUAllocator());
    c10::SetCPUAllocator(made);
    return made;
  }();
  return *it;
}

c10::DeleterFnPtr Pool::raw_deleter() const {
  return [](void* data) { pool().free(data); };
}

}  // namespace

void reuse_cpu_memory(bool on) { pool().switch_on(on); }

}  // namespace gpipe
