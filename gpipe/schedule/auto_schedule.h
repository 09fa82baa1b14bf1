#pragma once

#include "gpipe/timeline.h"

namespace gpipe {

/// Returns a schedule whose step measures what fastest_schedule() needs: 1f1b, with I and W in place of every second B.
/// Where 1f1b does not fit the layout, interleaved_1f1b or a list schedule takes its place.
Schedule measuring_schedule(const Layout& layout);

/// Returns the schedule with the fewest cells in memory, among those within 1 % of the fastest in simulation: a name, or
/// the text form of a list schedule if that is faster than all names by more than 3 %. Leaves out schedules that fill and
/// drain, because they sum gradients in another order. Transfers take no time. `measured`: a step of
/// measuring_schedule(), with all stages. `last_is_smaller`: ignores the last micro-batch. `saves_memory`: leaves out
/// schedules with more cells or graphs on a worker than the measured schedule ever has.
std::string fastest_schedule(const Timeline& measured, const Layout& layout, const Checkpoints& checkpoints,
                             bool last_is_smaller, bool saves_memory);

}  // namespace gpipe
