#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "gpipe/schedule/generators.h"
#include "gpipe/schedule/program.h"
#include "gpipe/schedule/simulator.h"

namespace gpipe {

/// What a list scheduler makes a schedule for.
struct Workload {
  Layout layout;
  std::vector<Edge> edges = {};  ///< capacities are not used
  Costs costs = {};              ///< as simulate() takes them; also of I and W
  Checkpoint checkpoint = Checkpoint::kNever;
};

/// The memory that the cells of a worker may take, in any unit. A cell takes its part from its F to its last backward
/// action.
struct Budget {
  std::vector<std::int64_t> cells;    ///< per stage: what a cell takes
  std::vector<std::int64_t> workers;  ///< per worker; raised to one cell of each of its stages if it is less
};

/// Which action a worker prefers, of those that it can start at the same time. W comes last, and of one kind the action
/// of the earliest micro-batch first.
struct Preference {
  static constexpr int kUnlimited = std::numeric_limits<int>::max();

  bool forward_first = false;  ///< otherwise backwards come first
  /// The most I of a worker that wait for their W at once. With 0, backwards are whole.
  int most_split = kUnlimited;
};

/// A schedule and its time.
struct ListSchedule {
  Schedule lists;
  double makespan = 0;  ///< what simulate() says, with sufficient_capacities()
};

/// Returns the lists that arise when each free worker runs one of the actions that can start. Nothing is planned ahead.
/// Actions of one kind and stage run in ascending order of micro-batches. The schedule never deadlocks, whatever the
/// edges. The lists have no R (see with_recomputes()), but the times include them. Bytes are not used.
/// REQUIRES: a valid layout and edges within it; costs for all stages and edges.
ListSchedule list_schedule(const Workload& workload, const Budget& budget, const Preference& preference);

/// The named rule "greedy", for any placement: the faster of two list schedules, backwards or forwards first, for equal
/// times of F, I and W and no skips. A worker with n stages holds at most n p cells, where p is the number of workers.
/// REQUIRES: a valid layout.
Schedule greedy(const Layout& layout);

}  // namespace gpipe
