#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gpipe::examples {

/// A small random number generator (SplitMix64) whose numbers are the same with every compiler and standard library.
/// std::shuffle and the standard distributions do not guarantee that. Not for cryptography.
///
/// Draw into named variables or inside braces, because function arguments are evaluated in an unspecified order.
class Random {
 public:
  /// Different streams of one seed are independent.
  explicit Random(uint64_t seed, uint64_t stream = 0) : state_(seed) {
    state_ = next() ^ (stream * 0xd1342543de82ef95u);
  }

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  /// A number from low to high, both included. REQUIRES: low <= high.
  int between(int low, int high) {
    const auto count = static_cast<uint64_t>(int64_t{high} - low + 1);
    return static_cast<int>(low + static_cast<int64_t>(((next() >> 32) * count) >> 32));
  }

  /// True in `percent` of 100 cases.
  bool chance(int percent) { return between(1, 100) <= percent; }

  template <class T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[static_cast<size_t>(between(0, static_cast<int>(i) - 1))]);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace gpipe::examples
