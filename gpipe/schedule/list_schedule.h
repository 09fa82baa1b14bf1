#pragma once

#include "gpipe/simulator.h"

namespace gpipe {

/// Returns lists of F, I and W in which each free worker runs an action that can start. W runs only if there is no other,
/// and early micro-batches run first. Tries F before I, and I before F, and keeps what makes the shorter step. Fits any
/// placement. A worker with n stages holds at most n × `depth` cells at once, and at least one per stage, so that the
/// oldest micro-batch can go on; `depth` can be a fraction. Never deadlocks, whatever the edges. REQUIRES: a valid layout,
/// and costs that fit it.
GPIPE_API Schedule list_schedule(const Layout& layout, const std::vector<Edge>& edges, const Costs& costs,
                                 const Checkpoints& checkpoints, double depth);

/// The same for actions that take equal times, with as many cells per stage as there are workers.
GPIPE_API Schedule list_schedule(const Layout& layout);

}  // namespace gpipe
