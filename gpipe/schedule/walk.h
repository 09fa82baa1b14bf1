#pragma once

#include <vector>

#include "absl/functional/function_ref.h"
#include "gpipe/schedule/program.h"
#include "gpipe/schedule/timeline.h"

namespace gpipe {

/// A worker at a standstill: the action, and the edge that it waits to take or to put.
struct Blocked {
  int worker = 0;
  Action action;
  int edge = 0;
  bool puts = false;
};

struct Walk {
  /// Per worker, in list order: the actions that were performed, step 0.
  std::vector<std::vector<Span>> spans;
  /// The workers that did not reach the end of their lists, ascending; empty unless the schedule deadlocks.
  std::vector<Blocked> blocked;
};

/// Executes a schedule by the executor's rules, in simulated time instead of threads: the common part of the verifier,
/// which asks only whether it ends, and the simulator. The schedule must have passed rules 1 to 3 of verifier.h.
///
/// No event queue is needed: a worker's times depend only on its own list and on what it exchanges, so the workers may
/// be advanced in any order, each as far as it can go.
///
/// `seconds` says what an action takes, `latencies` per edge from the put until the take.
Walk walk(const Layout& layout, const std::vector<Edge>& edges, const Wiring& wiring, const Schedule& schedule,
          absl::FunctionRef<double(const Action&)> seconds, const std::vector<double>& latencies);

}  // namespace gpipe
