#include "gpipe/runtime/memory_reuse.h"

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
#include "gpipe/runtime/mutex.h"

namespace gpipe {
namespace {

constexpr std::size_t kSmallest = std::size_t{64} << 10;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kGrowth = std::size_t{32} << 20;
constexpr std::size_t kMostAddresses = std::size_t{4} << 40;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Blocks of a size class serve each other; eight classes an octave waste a ninth at most.
std::size_t size_class(std::size_t bytes) { return round_up(bytes, std::bit_floor(bytes) / 8); }

// A reserved range of addresses; what lies before end_ is memory that can be used.
class Arena {
 public:
  Arena() {
    // Where the process may have only so many addresses: half of what could be had.
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

  // Null when there is no room in what is memory already.
  char* take(std::size_t bytes) {
    const auto room =
        std::find_if(rooms_.begin(), rooms_.end(), [&](const auto& each) { return each.second >= bytes; });
    if (room == rooms_.end()) return nullptr;
    auto rest = rooms_.extract(room);
    char* const start = rest.key();
    if (rest.mapped() > bytes) {
      rest.key() += bytes;
      rest.mapped() -= bytes;
      rooms_.insert(std::move(rest));
    }
    return start;
  }

  void give_back(char* start, std::size_t bytes) {
    const auto room = rooms_.emplace(start, bytes).first;
    const auto join = [&](auto first, auto second) {
      if (first->first + first->second != second->first) return;
      first->second += second->second;
      rooms_.erase(second);
    };
    if (std::next(room) != rooms_.end()) join(room, std::next(room));
    if (room != rooms_.begin()) join(std::prev(room), room);
  }

  // Makes room for that many bytes; false when there is no more memory.
  bool grow(std::size_t bytes) {
    const auto more = round_up(bytes, kGrowth);
    if (more > static_cast<std::size_t>(limit_ - end_)) return false;
    if (mprotect(end_, more, PROT_READ | PROT_WRITE) != 0) return false;
    madvise(end_, more, MADV_HUGEPAGE);  // or small pages, where that is refused
    give_back(end_, more);
    end_ += more;
    return true;
  }

 private:
  char* begin_ = nullptr;
  char* end_ = nullptr;
  char* limit_ = nullptr;
  std::map<char*, std::size_t> rooms_;  // those that nobody has, by address
};

// Blocks of at least kSmallest; all else is left to the allocator that was there before. Blocks are told apart by their
// address, because PyTorch may free what it has allocated raw with whatever allocator is current then.
//
// What is freed serves the next of its size class, the last first. A block that no free one serves is cut from the
// arena; when there is no room and less than half of it is in use, as after a change of shapes, all free blocks become
// room again before it grows.
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
    std::size_t bytes = 0;  // asked for
    bool reported = false;
  };
  struct SizeClass {
    std::vector<char*> free;  // of a capacity for all, so that nothing can fail when they come back
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

  // No bytes for what is not of the pool.
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

  // Null when there is no more memory.
  char* cut(std::size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    char* start = arena_.take(size);
    if (start == nullptr && 2 * bytes_used_ < arena_.size()) {
      make_room();
      start = arena_.take(size);
    }
    if (start == nullptr && arena_.grow(size)) start = arena_.take(size);
    if (start == nullptr) {
      make_room();
      start = arena_.take(size);
    }
    return start;
  }

  void make_room() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
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
  absl::flat_hash_map<std::size_t, SizeClass> classes_ ABSL_GUARDED_BY(mutex_);  // by their blocks' size
  absl::flat_hash_map<void*, Block> used_ ABSL_GUARDED_BY(mutex_);
  std::size_t bytes_used_ ABSL_GUARDED_BY(mutex_) = 0;
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
