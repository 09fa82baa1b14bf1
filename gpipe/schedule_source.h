#pragma once

#include <string_view>

#include "gpipe/api.h"
#include "gpipe/program.h"

namespace gpipe {

/// A schedule and the layout that it implies.
struct ParsedSchedule {
  Layout layout;
  Schedule schedule;
};

/// The text form of schedules, as PyTorch's pipelining prints them: one line per worker, actions such as 2F0 (stage 2,
/// forward, micro-batch 0) separated by spaces.
GPIPE_API std::string to_text(const Schedule& schedule);

/// Parses the text form. Commas separate actions too. Empty lines and the rest of a line after '#' are skipped. The
/// layout has the stages, micro-batches and workers that occur. Does not check that the schedule can run. Errors:
/// std::invalid_argument, with line and column, for text that is not of this form, or a stage on two workers.
GPIPE_API ParsedSchedule parse_schedule(std::string_view text);

/// Where the schedules of a pipeline come from, and the placement that they need.
struct ScheduleSource {
  std::vector<int> placement;
  ScheduleFunction make;
};

/// Reads a file in the text form of schedules. Errors: std::invalid_argument, with the path, for a file that cannot be
/// read, is larger than 64 MiB, or is malformed.
GPIPE_API ParsedSchedule read_schedule(const std::string& path);

/// Whether `schedule` is "@FILE" or text, not a name. A text has a separator, or is one action.
GPIPE_API bool has_lists(std::string_view schedule);

/// Reads "@FILE" or text. Errors: as read_schedule() and parse_schedule(). REQUIRES: has_lists().
GPIPE_API ParsedSchedule lists_of(const std::string& schedule);

/// Returns the source for `schedule`: a name (see schedules.h), "@FILE", or the text form. The stages of a name are on
/// `placement`, or if that is empty where the rule places them. Lists imply their own placement. Lists have no
/// schedule for another number of micro-batches; but for fewer, as in a smaller last mini-batch, list_schedule() takes the
/// place of a text. Errors: as lists_of()
/// and the rule; std::invalid_argument for lists for another number of stages or another placement, stages_per_worker
/// together with a placement or lists, or a schedule that does not fit the placement.
GPIPE_API ScheduleSource schedule_source(const std::string& schedule, int stages, int stages_per_worker,
                                         std::vector<int> placement = {});

}  // namespace gpipe
