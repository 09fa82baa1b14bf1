// Profiles by hand.
#pragma once

#include "balance/profile.h"
#include "tests/support/matchers.h"

namespace gpipe {

/// A profile of layers with these forward times, and backwards that take twice as long. Each layer's output has 10
/// bytes, which are kept for the next layer's backward.
inline Profile chain(const std::vector<double>& seconds) {
  Profile profile{.samples = 4, .device = "cpu"};
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    const int layer = static_cast<int>(i);
    profile.layers.push_back({.name = "l" + std::to_string(i),
                              .forward = seconds[i],
                              .stored = seconds[i],
                              .backward = 2 * seconds[i],
                              .output = 10,
                              .saved = 10,
                              .forward_extra = 10,
                              .stored_extra = 10,
                              .backward_extra = 10,
                              .shares_with = layer});
    profile.blocks.push_back({10, Kind::F, layer, Kind::B, layer + 1, layer + 1});
    profile.blocks.push_back({10, Kind::B, layer, Kind::B, layer - 1, layer});
  }
  auto& last = profile.blocks[profile.blocks.size() - 2];
  last.until = Kind::F;
  last.freed_by = Block::kForwardsEnd;
  profile.blocks[1].freed_by = Block::kNever;
  return profile;
}

}  // namespace gpipe
