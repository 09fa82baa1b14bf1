#pragma once

#include <cstdint>
#include <vector>

#include "balance/profile.h"
#include "balance/stage_cost.h"

namespace gpipe {

// The best balances of a profiled model, exactly: see best_partition(). Layers that share a parameter stay together. Errors:
// std::invalid_argument for fewer layers, or places to cut, than partitions.

/// The balance whose slowest stage is fastest.
std::vector<std::int64_t> balance_by_time(const Profile& profile, int partitions, const RunOptions& options = {});

/// The balance whose largest stage has the fewest bytes in use: parameters, what training keeps of them, and
/// activations, skips included.
std::vector<std::int64_t> balance_by_size(const Profile& profile, int partitions, const RunOptions& options = {});

/// The fastest balance of those whose stages all stay within a number of bytes; empty when there is none.
std::vector<std::int64_t> balance_within(std::int64_t bytes, const Profile& profile, int partitions,
                                         const RunOptions& options = {});

}  // namespace gpipe
