#pragma once

#include "gpipe/schedule/program.h"

namespace gpipe {

// Generators are pure functions of the layout. Errors: std::invalid_argument for an invalid layout.

/// Forwards only: each worker runs micro-batches 0..m-1 of each of its stages, stages ascending.
Schedule fill(const Layout& layout);

/// GPipe's schedule (Huang et al., arXiv:1811.06965): fill, then drain from micro-batch m-1 to 0, stages descending.
/// Adds the R's of with_recomputes(), so a worker holds at most one recomputed cell.
Schedule fill_drain(const Layout& layout, Checkpoint checkpoint);

/// Inserts an R directly before the B or I of each cell that recomputes. An R takes no gradient, so a worker recomputes
/// while it would otherwise wait for one.
Schedule with_recomputes(Schedule schedule, Checkpoint checkpoint, int micro_batches);

}  // namespace gpipe
