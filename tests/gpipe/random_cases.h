// Random test cases: how many there are, and drawing them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>

namespace gpipe {

/// The seeds of the cases to try.
struct Seeds {
  std::uint64_t first = 1;
  std::uint64_t count = 0;
};

/// Seeds 1 to `count`, or those that GPIPE_GENERATED_SEED (the first) and GPIPE_GENERATED_CASES (the count) ask for.
inline Seeds seeds_from_environment(std::uint64_t count) {
  const auto read = [](const char* name, std::uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
  };
  return {read("GPIPE_GENERATED_SEED", 1), read("GPIPE_GENERATED_CASES", count)};
}

/// A number from `low` to `high`, the same with every standard library.
inline int draw(std::mt19937_64& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
}

}  // namespace gpipe
