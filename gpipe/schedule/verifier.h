#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpipe/schedule/program.h"

namespace gpipe {

/// Bounds that follow from the order of the lists alone, so that no timing can exceed them.
struct Peaks {
  /// Per stage: most cells at once between their F and their last backward action. (For inference: 1.)
  std::vector<int> live;
  /// Per stage: most cells at once that hold an autograd graph (since F, or since R where there is one; until B or W).
  /// (For inference: 0.)
  std::vector<int> graphs;
};

/// The layout's share of rule 1 below.
absl::Status verify(const Layout& layout);

/// Proves that a schedule can be executed:
///   1. layout, placement and edges make sense (at most kMostCells cells, from < to, capacity >= 1);
///   2. every cell has exactly one F, and either no backward at all in the whole schedule or exactly one B, or one I
///      and one W; at most one R, and none without a backward; each on the worker of its stage;
///   3. within a cell: F < R < B, F < R < I < W;
///   4. run with the executor's rules (an action takes its edges, runs, then puts its edges, waiting while an edge is
///      at capacity) every action is reached.
/// Rule 4 is decided by running the lists without time; the outcome does not depend on the order in which workers
/// progress, because every edge has one producer and one consumer in each direction.
/// Errors: as Program::make. Takes time linear in the actions and what they exchange.
absl::StatusOr<Peaks> verify(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule);

}  // namespace gpipe
