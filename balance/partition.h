#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"

namespace gpipe {

/// Cuts the elements 0..count-1 into `parts` contiguous, non-empty parts so that the most expensive part is as cheap as
/// possible. Returns the number of elements per part. Ties go to longer early parts.
///
/// `cost` returns the cost of a part with the elements first..end-1. Any function is allowed: infinity forbids the part,
/// and a longer part may cost less than a shorter one. Exact, by dynamic programming in O(parts x count^2) time.
///
/// Returns an empty list if every cut has a forbidden part. Errors: std::invalid_argument for parts < 1, fewer elements
/// than parts, or a cost that is NaN.
std::vector<std::int64_t> best_partition(int count, int parts, absl::FunctionRef<double(int first, int end)> cost);

/// The same for parts that cost the sum of their elements' costs. Errors: also for a negative or infinite cost.
std::vector<std::int64_t> best_partition(const std::vector<double>& costs, int parts);

}  // namespace gpipe
