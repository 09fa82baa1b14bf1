#pragma once

#include <limits>
#include <optional>

#include "gpipe/schedules.h"
#include "gpipe/simulator.h"

namespace gpipe {

struct Workload {
  Layout layout;
  std::vector<Edge> edges = {};
  Costs costs = {};  ///< as simulate() takes them; also of I and W
  Checkpoint checkpoint = Checkpoint::kNever;
};

struct ListOptions {
  static constexpr int kUnlimited = std::numeric_limits<int>::max();

  /// A worker with n stages holds at most n × depth cells at once. REQUIRES: at least 1.
  int depth = 1;
  /// Of actions that can start at once, W is last, backwards are first unless this is set, then early micro-batches.
  bool forward_first = false;
  /// The most I of a worker that wait for their W at once. With 0, backwards are whole.
  int most_split = kUnlimited;
};

struct ListSchedule {
  Schedule lists;
  double makespan = 0;  ///< what simulate() says, without Costs::sending
};

/// Returns the lists that arise when each free worker runs one of the actions that can start. Actions of one kind and
/// stage run in the order of micro-batches. Never deadlocks, whatever the edges. The lists have no R (see
/// with_recomputes()), but the times include them. REQUIRES: a valid layout, edges within it, and costs for all.
ListSchedule list_schedule(const Workload& workload, const ListOptions& options);

/// The rule "greedy", for any placement: the faster of two list schedules, backwards or forwards first, for equal times
/// of F, I and W. With p workers, a worker with n stages holds at most n p cells. REQUIRES: a valid layout.
Schedule greedy(const Layout& layout);

/// Searches for the fastest schedule whose workers use at most `most_bytes` each; if empty, any. Tries all named
/// schedules that fit, and list schedules with many options, with the R's of the workload's mode. Deterministic.
///
/// Returns nothing if no schedule that was tried keeps to `most_bytes`. Another one might. Errors:
/// std::invalid_argument for an invalid layout or edge, for costs that do not fit them (see simulate()), and, if
/// `most_bytes` is not empty, for another size than the number of workers or costs without bytes.
std::optional<Schedule> greedy_schedule(const Workload& workload, const std::vector<std::int64_t>& most_bytes);

}  // namespace gpipe
