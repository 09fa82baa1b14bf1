#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"

namespace gpipe {

/// Cuts the elements 0..count-1 into `parts` contiguous, non-empty parts so that the costliest part costs as little as
/// possible; returns the number of elements of each part. Among equals, the one whose early parts are longest. `cost`
/// says what a part of the elements first..end-1 costs, in any way at all: infinity forbids it, and a longer part may
/// cost less. Exact, by dynamic programming over all parts: O(parts x count^2), 1,000 elements into 64 parts in a
/// twentieth of a second.
///
/// Empty when each way to cut has a forbidden part. Errors: std::invalid_argument for parts < 1, fewer elements than
/// parts, or a cost that is not a number.
std::vector<std::int64_t> best_partition(int count, int parts, absl::FunctionRef<double(int first, int end)> cost);

/// The same where a part costs the sum of its elements' costs. Errors: also for a cost that is negative or not finite.
std::vector<std::int64_t> best_partition(const std::vector<double>& costs, int parts);

}  // namespace gpipe
