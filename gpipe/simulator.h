#pragma once

#include <array>

#include "gpipe/schedule/footprint.h"

namespace gpipe {

/// The costs of a program's actions and edges.
struct Costs {
  /// Seconds per stage, indexed by Kind.
  std::vector<std::array<double, 5>> actions;
  /// Seconds per edge, in either direction, from a put until the consumer can take. Delays only the consumer.
  std::vector<double> edges;
  /// Bytes per stage. If empty, the timeline has no bytes.
  std::vector<CellBytes> bytes = {};
  /// Seconds per stage of an F whose cell is recomputed. If empty, such an F costs the same as any other.
  std::vector<double> stored = {};
  /// The part of `edges` during which the link between the two workers, in that direction, is busy, so that the next
  /// transfer waits. If empty, links carry any number of transfers at once.
  std::vector<double> sending = {};
};

struct Simulation {
  Timeline timeline;
  double makespan = 0;  ///< seconds, from 0 to the last end
  double bubble = 0;    ///< idle time / (workers x makespan), in [0, 1)
  /// Per worker: the most cells alive at once (see Peaks::live). 1 for a program without a backward.
  std::vector<int> peak_cells;
};

/// Runs a program in simulated time by the executor's rules. Deterministic. Errors: std::invalid_argument if the costs
/// do not fit the program.
Simulation simulate(const Program& program, const Costs& costs);

}  // namespace gpipe
