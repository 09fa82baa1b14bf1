#pragma once

#include "absl/functional/function_ref.h"
#include "gpipe/timeline.h"

namespace gpipe {

/// Upper bounds that hold for any timing: they follow from the order of the lists.
struct Peaks {
  /// Per stage: the most cells alive at once: from F to the last backward action. 1 for a schedule without a backward.
  std::vector<int> live;
  /// Per stage: the most cells with an autograd graph at once: from R, or F, to B or W. 0 without a backward.
  std::vector<int> graphs;
};

/// Checks the layout and its placement: a part of rule 1 below. Errors: std::invalid_argument.
void verify(const Layout& layout);

/// Proves that a schedule can be executed:
///   1. The layout, the placement and the edges are valid: at most kMostCells cells, from < to.
///   2. Every cell has exactly one F and at most one R. Either every cell has a backward (one B, or one I and one W),
///      or none has a backward or an R. Every action is on the worker of its stage.
///   3. Within a cell the order is F, R, B or F, R, I, W.
///   4. Every action is reached when the lists run by the executor's rules: an action takes its edges, runs, then puts
///      its edges. No put waits: a micro-batch lies on an edge only while its cell in the sending stage is alive.
/// Rule 4 then holds for any timing, because each edge has one producer and one consumer in each direction. Takes time
/// linear in the number of actions and exchanges. Errors: as Program::make.
Peaks verify(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule);

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
/// `latencies` and `sending` are as Costs::edges and Costs::sending.
/// REQUIRES: the schedule satisfies rules 1 to 3 of verify().
Replay replay(const Layout& layout, const std::vector<Edge>& edges, const Wiring& wiring, const Schedule& schedule,
              absl::FunctionRef<double(const Action&)> seconds, const std::vector<double>& latencies,
              const std::vector<double>& sending = {});

/// Returns, per stage, the most cells alive at once, for any timing. Skips stages that do not exist.
std::vector<int> most_cells(const Schedule& schedule, int stages);

/// Returns the largest number of cells of a worker's list that are alive at once, over all its stages.
int peak_cells(const std::vector<Action>& list);

}  // namespace gpipe
