#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <utility>

namespace gpipe::accelerator {

/// The bytes that PyTorch's caching allocator would take from one device: c10/cuda/CUDACachingAllocator.cpp, with its
/// default options. A stream has a pool for blocks of at most 1 MiB and another for larger ones. A pool cuts blocks out
/// of segments, which it never returns.
class CachingAllocator {
 public:
  void allocate(std::int64_t id, int stream, std::int64_t bytes) {
    const auto size = std::max(kUnit, rounded(bytes, kUnit));
    const bool small = size <= kSmall;
    auto& pool = pools_[{stream, small}];
    Segment* best_segment = nullptr;
    Segment::iterator best;
    for (auto& segment : pool) {
      for (auto block = segment.begin(); block != segment.end(); ++block) {
        if (block->used || block->size < size || (best_segment && block->size >= best->size)) continue;
        best_segment = &segment;
        best = block;
      }
    }
    if (!best_segment) {
      best_segment = &pool.emplace_back(1, Block{segment_size(size)});
      best = best_segment->begin();
      reserved_ += best->size;
    }
    const auto rest = best->size - size;
    if (small ? rest >= kUnit : rest > kSmall) {
      best_segment->insert(std::next(best), Block{rest});
      best->size = size;
    }
    best->used = true;
    used_[id] = {best_segment, best};
  }

  void free(std::int64_t id) {
    auto [segment, block] = used_.extract(id).mapped();
    block->used = false;
    if (const auto next = std::next(block); next != segment->end() && !next->used) {
      block->size += next->size;
      segment->erase(next);
    }
    if (block == segment->begin() || std::prev(block)->used) return;
    std::prev(block)->size += block->size;
    segment->erase(block);
  }

  std::int64_t reserved() const { return reserved_; }

 private:
  struct Block {
    std::int64_t size;
    bool used = false;
  };
  using Segment = std::list<Block>;

  static constexpr std::int64_t kUnit = 512;
  static constexpr std::int64_t kSmall = 1 << 20;
  static constexpr std::int64_t kSmallSegment = 2 << 20;
  static constexpr std::int64_t kLargeSegment = 20 << 20;  // for blocks below 10 MiB

  static std::int64_t rounded(std::int64_t bytes, std::int64_t unit) { return (bytes + unit - 1) / unit * unit; }
  static std::int64_t segment_size(std::int64_t size) {
    if (size <= kSmall) return kSmallSegment;
    return size < kLargeSegment / 2 ? kLargeSegment : rounded(size, kSmallSegment);
  }

  std::map<std::pair<int, bool>, std::list<Segment>> pools_;  // by stream, and whether for small blocks
  std::map<std::int64_t, std::pair<Segment*, Segment::iterator>> used_;
  std::int64_t reserved_ = 0;
};

}  // namespace gpipe::accelerator
