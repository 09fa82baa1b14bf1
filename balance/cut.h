#pragma once

#include <cstdint>
#include <vector>

#include "balance/profile.h"
#include "balance/stage_cost.h"

namespace gpipe {

// Exact optima over all balances of a profiled model: see best_partition(). Layers that must be in one stage stay in one
// (LayerProfile::shares_with).
//
// Errors: std::invalid_argument for partitions < 1, for more partitions than layers, for invalid options, and, except
// from balance_within(), if every balance would separate such layers.

/// Returns the balance whose slowest stage is fastest.
std::vector<std::int64_t> balance_by_time(const Profile& profile, int partitions, const RunOptions& options = {});

/// Returns the balance whose largest stage needs the fewest bytes, by StageCost::bytes(): parameters, gradients,
/// optimizer state, buffers and activations, including skips.
std::vector<std::int64_t> balance_by_size(const Profile& profile, int partitions, const RunOptions& options = {});

/// Returns the balance whose slowest stage is fastest, among those whose stages need at most `bytes` each. Empty if
/// there is none.
std::vector<std::int64_t> balance_within(std::int64_t bytes, const Profile& profile, int partitions,
                                         const RunOptions& options = {});

}  // namespace gpipe
