#pragma once

#include "absl/functional/function_ref.h"
#include "gpipe/timeline.h"

namespace gpipe {

/// A worker that cannot continue: its current action, and the edge that it waits to take.
struct Blocked {
  int worker = 0;
  Action action;
  int edge = 0;
};

struct Replay {
  /// Per worker, in list order: the actions that ran, with step 0.
  std::vector<std::vector<Span>> spans;
  /// The workers that did not reach the end of their lists, ascending. Empty unless the schedule deadlocks.
  std::vector<Blocked> blocked;
};

/// Executes a schedule by the executor's rules in simulated time, without threads. Deterministic.
///
/// `seconds` returns the duration of an action. `latencies` and `sending` are as Costs::edges and Costs::sending.
/// REQUIRES: the schedule satisfies rules 1 to 3 of verifier.h.
Replay replay(const Layout& layout, const std::vector<Edge>& edges, const Wiring& wiring, const Schedule& schedule,
              absl::FunctionRef<double(const Action&)> seconds, const std::vector<double>& latencies,
              const std::vector<double>& sending = {});

}  // namespace gpipe
