#pragma once

#include <functional>
#include <optional>

#include "balance/profile.h"
#include "balance/run_options.h"
#include "gpipe/api.h"
#include "gpipe/partition.h"

namespace gpipe {

// Exact optima over all balances of a profiled model: see best_partition(). Layers that must be in one stage stay in
// one (LayerProfile::shares_with).
//
// Errors: std::invalid_argument for partitions < 1, for more partitions than layers, for invalid options, and if every
// balance would separate such layers.

/// Errors: std::invalid_argument unless `stages` is between 1 and `layers`.
GPIPE_API void check_stages(int stages, int layers);

/// Returns the balance whose slowest stage is fastest.
GPIPE_API std::vector<std::int64_t> balance_by_time(const Profile& profile, int partitions,
                                                    const RunOptions& options = {});

/// Returns the balance whose largest stage needs the fewest bytes if all chunks are in flight at once, by the estimates of
/// segments.h. A checkpoint mode other than kNever counts as kAlways.
GPIPE_API std::vector<std::int64_t> balance_by_size(const Profile& profile, int partitions,
                                                    const RunOptions& options = {});

class StageCost;

/// The inverse of stage_ends().
std::vector<std::int64_t> balance_of(const std::vector<int>& ends);

/// best_partition() of a model into stages that may be cut off.
std::vector<std::int64_t> cut_at(const StageCost& cost, int stages,
                                 const std::function<double(int stage, int first, int end)>& seconds);

/// Returns a balance for stages on the workers of `options.scheduling.placement`, which is not empty. Keeps the busiest
/// worker, or link from one worker to another, as little busy as its search finds: from the balance whose slowest stage
/// is fastest, moves a cut, or two cuts that lie opposite each other, as long as this helps.
std::vector<std::int64_t> balance_by_load(const StageCost& cost, const RunOptions& options);

/// Returns, for each layer, the bytes that a cut after it sends forward with each micro-batch: activation, skips across
/// it, and lent parameters. A skip or parameter that passes several cuts counts in each, but is sent once to each stage
/// that uses it. Empty where the model cannot be cut, and after the last layer. Errors: as StageCost.
GPIPE_API std::vector<std::optional<std::int64_t>> cut_bytes(const Profile& profile);

}  // namespace gpipe
