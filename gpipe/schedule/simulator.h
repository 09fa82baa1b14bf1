#pragma once

#include <array>
#include <vector>

#include "gpipe/schedule/footprint.h"
#include "gpipe/schedule/program.h"
#include "gpipe/schedule/timeline.h"

namespace gpipe {

/// What a program's parts cost.
struct Costs {
  /// Seconds, per stage, indexed by Kind.
  std::vector<std::array<double, 5>> actions;
  /// Seconds, per edge, either direction: from the put until the consumer may start; the producer does not wait for it.
  std::vector<double> edges;
  /// Per stage; or none, and then no bytes are accounted.
  std::vector<CellBytes> bytes = {};
  /// Seconds, per stage, of an F whose cell is recomputed; or none, and then it takes as long as any other.
  std::vector<double> stored = {};
};

struct Simulation {
  Timeline timeline;
  double makespan = 0;  ///< seconds, from 0 to the last end
  double bubble = 0;    ///< idle time / (workers x makespan), in [0, 1)
  /// Per worker: most cells at once between their F and their last backward action, over its stages.
  /// (For inference: 1.)
  std::vector<int> peak_cells;
};

/// Runs a program in simulated time under the executor's own rules, bounded edges included. Deterministic. Errors:
/// std::invalid_argument when the costs do not fit the program.
Simulation simulate(const Program& program, const Costs& costs);

}  // namespace gpipe
