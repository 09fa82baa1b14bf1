// The units that random models are made of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/gpipe/bare_builder.h"

namespace gpipe::bare {

constexpr std::int64_t kWidth = 4;

/// The number of variants of a unit. Some units have fewer, and treat several as one.
constexpr int kVariants = 4;

/// One or more layers that map a tensor [samples, kWidth] to another of that shape.
struct Unit {
  enum class Role { kWhole, kStash, kPop, kStashOdd, kPopOdd };

  const char* name;
  void (*build)(Builder& builder, int variant, const std::string& skip);
  bool in_place = false;  ///< changes its input in place
  bool shares = false;    ///< passes on, or stashes, several tensors that share memory
  Role role = Role::kWhole;
};

const std::vector<Unit>& units();

}  // namespace gpipe::bare
