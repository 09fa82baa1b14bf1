#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "gpipe/schedule/program.h"

namespace gpipe {

/// A schedule and the layout that it implies.
struct ParsedSchedule {
  Layout layout;
  Schedule schedule;
};

/// The text form of schedules, as PyTorch's pipelining prints them: one line per worker, actions such as 2F0 (stage 2,
/// forward, micro-batch 0) separated by spaces. Kinds are those of to_char(Kind).
std::string to_text(const Schedule& schedule);

/// Parses the text form. Commas separate actions too. Empty lines and the rest of a line after '#' are skipped. The layout
/// has the stages, micro-batches and workers that occur. Does not check that the schedule can run; Program::make() does. Errors: InvalidArgument, with line and column, for text that is not of this form, or a stage on two workers.
absl::StatusOr<ParsedSchedule> parse_schedule(std::string_view text);

}  // namespace gpipe
