#pragma once

#include <cstdint>
#include <vector>

#include "balance/profile.h"
#include "balance/stage_cost.h"

namespace gpipe {

// The best balances of a profiled model, exactly: see best_partition(). Layers that share a parameter stay together.
// Errors: std::invalid_argument for partitions < 1, for more partitions than layers or, but from balance_within(), than
// can be cut without parting such layers, and for options that make no sense.

/// The balance whose slowest stage is fastest.
std::vector<std::int64_t> balance_by_time(const Profile& profile, int partitions, const RunOptions& options = {});

/// The balance whose largest stage has the fewest bytes in use, by StageCost::bytes(): parameters, what training keeps
/// of them, and activations, skips included.
std::vector<std::int64_t> balance_by_size(const Profile& profile, int partitions, const RunOptions& options = {});

/// The balance whose slowest stage is fastest, of those whose stages all stay within a number of bytes; empty when
/// there is none.
std::vector<std::int64_t> balance_within(std::int64_t bytes, const Profile& profile, int partitions,
                                         const RunOptions& options = {});

}  // namespace gpipe
