#pragma once

#include <string>

#include "gpipe/schedule/program.h"
#include "gpipe/timeline.h"

namespace gpipe {

/// Returns the schedule whose step measures what fastest_schedule() needs: 1f1b, or interleaved_1f1b or greedy on a layout
/// that 1f1b does not fit, but with I and W in place of every second B.
Schedule measuring_schedule(const Layout& layout, Checkpoint checkpoint);

/// Returns the name of the schedule that simulate() finds fastest. Of schedules within 1 % of the fastest, the one that
/// holds the fewest cells counts. Leaves out schedules that fill and drain, so that the choice does not change the order of
/// sums. Transfers take no time.
/// `measured`: a step of measuring_schedule(). Ignores a last micro-batch that is smaller than the others (`last_is_smaller`).
/// `saves_memory`: leaves out schedules whose fullest worker holds more cells or graphs than that of 1f1b, or of the rule
/// in its place, also with more micro-batches. REQUIRES: `measured` has all stages.
std::string fastest_schedule(const Timeline& measured, const Layout& layout, Checkpoint checkpoint,
                             bool last_is_smaller, bool saves_memory);

}  // namespace gpipe
