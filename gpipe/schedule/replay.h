#pragma once

#include <vector>

#include "absl/functional/function_ref.h"
#include "gpipe/schedule/program.h"
#include "gpipe/schedule/timeline.h"

namespace gpipe {

/// A worker that cannot go on: its current action, and the edge that it waits to take or to put.
struct Blocked {
  int worker = 0;
  Action action;
  int edge = 0;
  bool puts = false;  ///< waits to put, not to take
};

struct Replay {
  /// Per worker, in list order: the actions that ran, with step 0.
  std::vector<std::vector<Span>> spans;
  /// The workers that did not reach the end of their lists, ascending. Empty unless the schedule deadlocks.
  std::vector<Blocked> blocked;
};

/// Executes a schedule by the executor's rules in simulated time, without threads. The simulator uses the times; the
/// verifier only asks whether every list ends. Deterministic.
/// REQUIRES: the schedule satisfies rules 1 to 3 of verifier.h; `latencies` has one entry per edge.
///
/// `seconds` returns the duration of an action. `latencies` are the seconds from a put until the micro-batch can be
/// taken.
///
/// A worker's times depend only on its own list and on what it exchanges. The workers can therefore be advanced in any
/// order, each as far as possible, and no event queue is needed.
Replay replay(const Layout& layout, const std::vector<Edge>& edges, const Wiring& wiring, const Schedule& schedule,
              absl::FunctionRef<double(const Action&)> seconds, const std::vector<double>& latencies);

}  // namespace gpipe
