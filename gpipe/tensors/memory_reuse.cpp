#include "gpipe/memory_reuse.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <iterator>
#include <map>
#include <new>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

constexpr std::size_t kSmallest = std::size_t{64} << 10;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kGrowth = std::size_t{32} << 20;
constexpr std::size_t kMostAddresses = std::size_t{4} << 40;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// The block size for a tensor. Eight sizes per power of two waste at most a ninth of a block.
std::size_t size_class(std::size_t bytes) { return round_up(bytes, std::bit_floor(bytes) / 8); }

// A reserved range of addresses. The part from begin_ to end_ is usable memory.
class Arena {
 public:
  Arena() {
    // If the process's address space is limited, reserves half of the available part.
    for (auto length = kMostAddresses; length >= kGrowth; length /= 2) {
      void* range = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (range == MAP_FAILED) continue;
      if (length < kMostAddresses) {
        length /= 2;
        munmap(static_cast<char*>(range) + length, length);
      }
      const auto address = reinterpret_cast<std::uintptr_t>(range);
      begin_ = end_ = static_cast<char*>(range) + (round_up(address, kHugePage) - address);
      limit_ = static_cast<char*>(range) + length;
      return;
    }
  }

  std::size_t size() const { return end_ - begin_; }

  // Returns null if no free range of the usable memory is large enough.
  char* take(std::size_t bytes) {
    const auto range = std::find_if(free_.begin(), free_.end(), [&](const auto& each) { return each.second >= bytes; });
    if (range == free_.end()) return nullptr;
    auto rest = free_.extract(range);
    char* const start = rest.key();
    if (rest.mapped() > bytes) {
      rest.key() += bytes;
      rest.mapped() -= bytes;
      free_.insert(std::move(rest));
    }
    return start;
  }

  void give_back(char* start, std::size_t bytes) {
    const auto range = free_.emplace(start, bytes).first;
    const auto join = [&](auto first, auto second) {
      if (first->first + first->second != second->first) return;
      first->second += second->second;
      free_.erase(second);
    };
    if (std::next(range) != free_.end()) join(range, std::next(range));
    if (range != free_.begin()) join(std::prev(range), range);
  }

  // Adds at least `bytes` of usable memory. Returns false if the system refuses.
  bool grow(std::size_t bytes) {
    const auto more = round_up(bytes, kGrowth);
    if (more > static_cast<std::size_t>(limit_ - end_)) return false;
    if (mprotect(end_, more, PROT_READ | PROT_WRITE) != 0) return false;
    madvise(end_, more, MADV_HUGEPAGE);  // small pages if this fails
    give_back(end_, more);
    end_ += more;
    return true;
  }

 private:
  char* begin_ = nullptr;
  char* end_ = nullptr;
  char* limit_ = nullptr;
  std::map<char*, std::size_t> free_;  // free ranges: start and size
};

// Allocates blocks of at least kSmallest; the previous allocator, rest_, handles other sizes. Freed memory is
// recognised by its address, because PyTorch frees raw memory with the current allocator, whichever one allocated it.
//
// A freed block is reused for the same size class, last in, first out. If no block is free, one is cut from the arena.
// If the arena has no free range and less than half of it is in use, as after a change of shapes, all free blocks
// return to the arena before it grows.
class Pool : public c10::Allocator {
 public:
  explicit Pool(c10::Allocator* rest) : rest_(rest) {}

  void switch_on(bool on) { on_ = on; }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kSmallest || !on_) return rest_->allocate(bytes);
    const bool reported = c10::memoryProfilingEnabled();
    void* data = take({bytes, reported});
    if (data == nullptr) return rest_->allocate(bytes);
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
    std::size_t bytes = 0;  // as requested
    bool reported = false;
  };
  struct SizeClass {
    std::vector<char*> free;  // has capacity for all blocks, so that freeing cannot fail
    std::size_t blocks = 0;   // free or used
  };

  void* take(Block block) {
    const auto size = size_class(block.bytes);
    MutexLock lock(mutex_);
    auto& of_size = classes_[size];
    if (of_size.free.empty()) {
      of_size.free.reserve(of_size.blocks + 1);
      char* start = cut(size);
      if (start == nullptr) return nullptr;
      of_size.free.push_back(start);
      ++of_size.blocks;
    }
    char* data = of_size.free.back();
    used_.emplace(data, block);
    of_size.free.pop_back();
    bytes_used_ += size;
    return data;
  }

  // Returns a block of 0 bytes if `data` is not from the pool.
  Block give_back(void* data) {
    MutexLock lock(mutex_);
    const auto found = used_.find(data);
    if (found == used_.end()) return {};
    const auto block = found->second;
    const auto size = size_class(block.bytes);
    classes_.find(size)->second.free.push_back(static_cast<char*>(data));
    used_.erase(found);
    bytes_used_ -= size;
    return block;
  }

  // Returns null if there is no more memory.
  char* cut(std::size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    char* start = arena_.take(size);
    if (start == nullptr && 2 * bytes_used_ < arena_.size()) {
      return_free_blocks();
      start = arena_.take(size);
    }
    if (start == nullptr && arena_.grow(size)) start = arena_.take(size);
    if (start == nullptr) {
      return_free_blocks();
      start = arena_.take(size);
    }
    return start;
  }

  void return_free_blocks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (auto& [size, of_size] : classes_) {
      while (!of_size.free.empty()) {
        arena_.give_back(of_size.free.back(), size);
        of_size.free.pop_back();
        --of_size.blocks;
      }
    }
  }

  c10::Allocator* const rest_;
  std::atomic<bool> on_ = false;
  Mutex mutex_;
  Arena arena_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::size_t, SizeClass> classes_ ABSL_GUARDED_BY(mutex_);  // by block size
  absl::flat_hash_map<void*, Block> used_ ABSL_GUARDED_BY(mutex_);
  std::size_t bytes_used_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The process's pool. Never destroyed, because tensors can outlive static objects.
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
