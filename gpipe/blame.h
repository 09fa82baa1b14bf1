#pragma once

#include <string>

#include "gpipe/timeline.h"

namespace gpipe {

/// What a part of a worker's wait went to.
enum class Cause : std::uint8_t {
  kWork,     ///< an action computed
  kQueued,   ///< the thread of an action waited for a core
  kBlocked,  ///< the thread of an action slept, as it does at a lock such as the Python interpreter's
  kWire,     ///< data went from one action to the next
  kCaller,   ///< no action could run: the caller prepares the call, or runs the optimizer or the loader
};

/// A part of a wait. A kWire has an edge and the action that put; -1 if the action put nothing.
struct Piece {
  Cause cause = Cause::kWork;
  int worker = 0;
  Action action;
  int edge = -1;
  double seconds = 0;
};

/// A worker's time between two of its actions. The pieces, the latest first, sum to its duration.
struct Wait {
  int worker = 0;
  double start = 0;  ///< seconds, on the timeline's axis
  double end = 0;
  std::vector<Piece> pieces;
};

/// How a step depends on the actions of one stage and kind.
struct Slack {
  int stage = 0;
  Kind kind = Kind::F;
  double slower = 0;  ///< how much longer they may take at no cost: 0.08 is 8 %, 1 is 100 % or more
  double gain = 0;    ///< seconds by which the step is shorter if they take a tenth less
};

/// Where the time of one step went: from the end of the step before it, or from its own start, to its end.
struct StepBlame {
  int step = 0;
  double start = 0;  ///< seconds, on the timeline's axis
  double end = 0;
  /// With the actions, and their leads, the waits fill each worker's time.
  std::vector<Wait> waits;
  /// What the end of the step waited for, back to the start of its first action; the latest first.
  std::vector<Piece> critical_path;
  /// Seconds that sum to end - start: "work" is the actions' typical time divided by the workers; "caller"; and what
  /// else makes the step longer, as Shapley values over simulations without it: "recompute", "imbalance" of workers,
  /// "schedule", "wires", "locks", "cores" that were busy otherwise, "jitter" of actions of the same kind.
  std::map<std::string, double> parts;
  double replayed = 0;  ///< seconds of the simulation with the measured times, to compare with the actions' makespan
  /// The typical seconds of a transfer, per edge of the first replica.
  std::vector<double> transfers;
  std::vector<Slack> slack = {};  ///< of the timeline's last step
};

/// Says what each worker waited for, and where the time went, in each complete step. `timeline` has all workers: gather
/// it over ranks. Leaves out steps that have failed.
GPIPE_API std::vector<StepBlame> blame(const Timeline& timeline);

/// Returns a line of JSON per complete step, with its actions, blame(), and what changes of the plan would save in
/// simulations; the last one also has the changes that save time in all steps: `python -m gpipe report` reads it.
GPIPE_API std::string to_json_lines(const Timeline& timeline);

}  // namespace gpipe
