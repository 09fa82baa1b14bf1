// Random test cases: how many there are, drawing them, and shrinking one that fails.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <string>
#include <vector>

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

/// How often each feature occurred.
using Counts = std::map<std::string, int>;

inline void print(const std::string& title, const Counts& counts) {
  std::cout << title << ":";
  for (const auto& [feature, count] : counts) std::cout << " " << feature << " " << count << ",";
  std::cout << std::endl;
}

inline void print(const Seeds& seeds, const Counts& counts) {
  print(std::to_string(seeds.count) + " cases from seed " + std::to_string(seeds.first), counts);
}

/// A number from `low` to `high`, the same with every standard library.
inline int draw(std::mt19937_64& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
}

/// Shrinks a failing case: takes the first smaller case that fails too, until none does.
template <class Case, class Smaller, class Fails>
Case shrink(Case failing, Smaller smaller, Fails fails) {
  for (bool shrunk = true; shrunk;) {
    const std::vector<Case> candidates = smaller(failing);
    const auto found = std::find_if(candidates.begin(), candidates.end(), fails);
    shrunk = found != candidates.end();
    if (shrunk) failing = *found;
  }
  return failing;
}

}  // namespace gpipe
