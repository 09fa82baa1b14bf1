#pragma once

#include <map>
#include <string>
#include <vector>

#include "gpipe/schedule/program.h"

namespace gpipe {

/// Which cells recompute their forward instead of storing its graph.
enum class Checkpoint {
  kNever,
  kExceptLast,  ///< all but the last micro-batch that the mini-batch really has
  kAlways,
};

/// By name: "never", "except_last", "always".
std::map<std::string, Checkpoint> checkpoints();
std::string to_string(Checkpoint checkpoint);

// A schedule is a pure function of the layout. Errors: std::invalid_argument for a layout that makes no sense. Whether
// its edges have the capacity that a schedule needs is for Program::make to say.

/// The forwards alone: each worker runs, for its stages in ascending order, micro-batches 0..m-1.
Schedule fill(const Layout& layout);

/// GPipe's schedule (Huang et al., arXiv:1811.06965): fill, then drain from micro-batch m-1 to 0, stages descending.
/// A checkpointed cell's R stands directly before its B: it needs no gradient, so a worker that would wait for one
/// recomputes meanwhile, and never holds more than one recomputed cell.
Schedule fill_drain(const Layout& layout, Checkpoint checkpoint);

/// Inserts an R directly before the B or I of each cell that recomputes. An R waits for nothing, so a worker recomputes
/// while it would wait for gradients.
Schedule with_recomputes(Schedule schedule, Checkpoint checkpoint, int micro_batches);

/// The program that these make of a model cut into stages, a worker each, over edges that hold a whole mini-batch: fill
/// and drain, or without `backward` the fill alone. Errors: std::invalid_argument for numbers or edges that make no
/// sense.
Program gpipe_program(int stages, int micro_batches, std::vector<Edge> edges, Checkpoint checkpoint, bool backward);

}  // namespace gpipe
