#pragma once

#include <cstdint>
#include <vector>

namespace gpipe {

/// Cuts a sequence of costs into `parts` contiguous, non-empty parts so that the costliest part costs as little as
/// possible; returns the number of elements of each part. Among equals, the one whose early parts are longest. Exact,
/// by dynamic programming in O(parts x n^2) at worst, with the inner loop cut short. Errors: std::invalid_argument for
/// parts < 1, fewer costs than parts, or a cost that is negative or not finite.
std::vector<std::int64_t> partition(const std::vector<double>& costs, int parts);

}  // namespace gpipe
