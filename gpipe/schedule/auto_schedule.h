#pragma once

#include "gpipe/timeline.h"

namespace gpipe {

/// Returns a schedule whose step measures what fastest_schedule() needs: 1f1b, with I and W in place of every second B.
/// Where 1f1b does not fit the layout, interleaved_1f1b or greedy takes its place.
Schedule measuring_schedule(const Layout& layout, Checkpoint checkpoint);

/// Returns the name of the schedule with the fewest cells in memory, among those that are within 1 % of the fastest in
/// simulation. Schedules that fill and drain are left out, because they sum gradients in another order. Transfers take
/// no time. `measured`: a step of measuring_schedule(), with all stages. `last_is_smaller`: whether the last
/// micro-batch has fewer samples than the others. It is then ignored. `saves_memory`: whether to leave out schedules
/// that need more memory than 1f1b, or than the rule in its place. Compares the most cells and the most graphs on a
/// worker, for any number of micro-batches.
std::string fastest_schedule(const Timeline& measured, const Layout& layout, Checkpoint checkpoint,
                             bool last_is_smaller, bool saves_memory);

}  // namespace gpipe
