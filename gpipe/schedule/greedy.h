#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gpipe/schedule/list_scheduler.h"

namespace gpipe {

/// Searches for the fastest schedule whose workers use at most `most_bytes`, one number per worker; if it is empty,
/// memory is unlimited. Tries all named schedules that fit the layout, and list schedules with many options. So in
/// simulation, with sufficient_capacities(), the result is never slower than a named schedule that keeps to
/// `most_bytes`. It has the R's of the workload's checkpoint mode. Deterministic.
///
/// Returns nothing if no schedule that was tried keeps to `most_bytes`. Another one might.
/// Errors: std::invalid_argument for an invalid layout or edge, for costs that do not fit them (see simulate()), and, if
/// `most_bytes` is not empty, for another size than the number of workers or costs without bytes.
std::optional<Schedule> greedy_schedule(const Workload& workload, const std::vector<std::int64_t>& most_bytes);

}  // namespace gpipe
