#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "gpipe/api.h"

namespace gpipe {

/// Cuts the elements 0..count-1 into `parts` contiguous, non-empty parts so that the most expensive part is as cheap as
/// possible. Returns the number of elements per part. Ties go to longer early parts.
///
/// `cost` returns the cost of a part, from 0, with the elements first..end-1. Any function is allowed: infinity forbids
/// it, and a longer part may cost less than a shorter one. Exact, by dynamic programming in O(parts x count^2) time.
///
/// Empty if every cut has a forbidden part. Errors: std::invalid_argument for parts < 1, more than elements, or NaN.
GPIPE_API std::vector<std::int64_t> best_partition(int count, int parts,
                                                   const std::function<double(int part, int first, int end)>& cost);

}  // namespace gpipe
