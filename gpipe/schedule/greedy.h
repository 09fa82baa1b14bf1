#pragma once

#include "gpipe/schedule/program.h"

namespace gpipe {

struct ListOptions {
  /// A worker with n stages holds at most n × depth cells at once. REQUIRES: at least 1.
  int depth = 1;
  /// Of actions that can start at once, W is last, backwards are first unless this is set, then early micro-batches.
  bool forward_first = false;
};

struct ListSchedule {
  Schedule lists;
  int makespan = 0;  ///< in actions
};

/// Returns the lists of F, I and W that arise when each free worker runs one of the actions that can start, and all
/// actions take equal times. Actions of one kind and stage run in the order of micro-batches. Never deadlocks, whatever
/// the edges. REQUIRES: a valid layout.
ListSchedule list_schedule(const Layout& layout, const ListOptions& options);

/// The rule "greedy", for any placement: the faster of two list schedules, backwards or forwards first. With p workers,
/// a worker with n stages holds at most n p cells. REQUIRES: a valid layout.
Schedule greedy(const Layout& layout);

}  // namespace gpipe
