#pragma once

#include <functional>
#include <string>
#include <vector>

#include "gpipe/schedule/generators.h"
#include "gpipe/schedule/program.h"

namespace gpipe {

/// Generates the schedule of a training step. Throws std::invalid_argument for a layout that it has no schedule for.
using ScheduleFunction = std::function<Schedule(const Layout& layout, Checkpoint checkpoint)>;

/// Where the schedules of a pipeline come from, and the placement that they need.
struct ScheduleSource {
  std::vector<int> placement;
  ScheduleFunction make;
};

/// Returns the source for `schedule`: a name (see schedules.h), on the looped placement; or @FILE, a file in the text form
/// of schedules, on the placement that its lines imply. A schedule from a file without any R gets those of the checkpoint
/// mode. Errors: std::invalid_argument for
/// an unknown name, a file that is missing or malformed, a file for another number of stages, or stages that
/// `stages_per_worker` does not divide.
ScheduleSource schedule_source(const std::string& schedule, int stages, int stages_per_worker);

}  // namespace gpipe
