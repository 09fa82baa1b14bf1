#pragma once

#include <map>
#include <string>
#include <vector>

#include "gpipe/schedule/program.h"

namespace gpipe {

/// Which cells recompute their forward instead of storing its graph.
enum class Checkpoint {
  kNever,
  kExceptLast,  ///< all except those of the mini-batch's last micro-batch
  kAlways,
};

/// Returns all modes by name: "never", "except_last", "always".
std::map<std::string, Checkpoint> checkpoints();
std::string to_string(Checkpoint checkpoint);

// Generators are pure functions of the layout. Whether the edges have enough capacity is checked by Program::make, not
// here. Errors: std::invalid_argument for an invalid layout.

/// Forwards only: each worker runs micro-batches 0..m-1 of each of its stages, stages ascending.
Schedule fill(const Layout& layout);

/// GPipe's schedule (Huang et al., arXiv:1811.06965): fill, then drain from micro-batch m-1 to 0, stages descending.
/// The R of a checkpointed cell stands directly before its B, so a worker holds at most one recomputed cell.
Schedule fill_drain(const Layout& layout, Checkpoint checkpoint);

/// GPipe's program with one stage per worker: fill_drain(), or fill() if `backward` is false. Sets the capacity of each
/// edge to `micro_batches`. Errors: std::invalid_argument for invalid numbers or edges.
Program gpipe_program(int stages, int micro_batches, std::vector<Edge> edges, Checkpoint checkpoint, bool backward);

}  // namespace gpipe
