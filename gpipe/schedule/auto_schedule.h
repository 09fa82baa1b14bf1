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
/// schedules with more cells or graphs on a worker than the one that was measured ever has.
std::string fastest_schedule(const Timeline& measured, const Layout& layout, const Checkpoints& checkpoints,
                             bool last_is_smaller, bool saves_memory);

/// Returns the program whose step made these spans, which are in the order of each worker. Errors: std::invalid_argument
/// unless all actions are there.
Program program_of(const std::vector<Span>& spans, std::vector<Edge> edges);

/// Returns by how many seconds a complete step of a timeline would be shorter with one other argument, such as
/// "schedule='zb_h1'", or longer, if negative. As simulations of both with the step's times say, in which actions of one
/// stage and kind take equal times and transfers none. Leaves out schedules that split backwards if the step split none, and
/// all schedules if a number of micro-batches is recomputed. Of replicas, the first counts.
std::map<std::string, double> gains(const Timeline& timeline, int step);

}  // namespace gpipe
