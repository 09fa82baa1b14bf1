#pragma once

#include <array>
#include <cstdint>

#include "gpipe/api.h"
#include "gpipe/timeline.h"

namespace gpipe {

/// The action, of one stage and the same micro-batch, whose end frees memory. Or, of no stage, the last two.
enum class Until {
  kForward,
  kRecompute,       ///< R of a cell that is recomputed, else F
  kSendsGradients,  ///< I of a split backward, else B
  kLast,            ///< W of a split backward, else B
  kForwardsEnd,     ///< the step's last forward
  kNever,           ///< nothing within the step
};

/// Bytes that an action leaves allocated, and what frees them. E.g. an activation that the next stage saves on the same
/// device: {bytes, Until::kLast, stage + 1}.
struct HeldBytes {
  std::int64_t bytes = 0;
  Until until = Until::kLast;
  int stage = 0;  ///< of the action that frees the bytes
  /// Not freed before the cell's own action that sends gradients has ended either.
  bool until_own_backward = false;
};

struct GPIPE_API ActionBytes {
  std::int64_t extra = 0;       ///< peak while it runs, relative to the bytes before it
  std::vector<HeldBytes> held;  ///< what it leaves allocated

  std::int64_t kept() const;
};

struct CellBytes {
  ActionBytes forward;                     ///< an F that builds its graph
  ActionBytes stored;                      ///< an F whose cell is recomputed
  ActionBytes recompute;                   ///< R
  ActionBytes backward;                    ///< B
  ActionBytes input_gradient;              ///< I
  std::int64_t weight_gradient_extra = 0;  ///< of a W
  /// Peaks of the stage's first B, I and W, which allocate the gradient sums. Used where they exceed later peaks.
  std::int64_t first_backward_extra = 0;
  std::int64_t first_input_gradient_extra = 0;
  std::int64_t first_weight_gradient_extra = 0;
  /// Sums of the parameters' gradients, allocated by the first backward and not freed within the step; and the part of
  /// them that a split backward allocates in its I.
  std::int64_t parameters = 0;
  std::int64_t early_parameters = 0;
  /// Whether an I leaves anything to W. If not, it computes everything.
  bool splits = true;
};

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

/// Sets the bytes of every span of a timeline from what the cells of each stage allocate. Errors: std::invalid_argument
/// for a span or edge of a stage without bytes, or bytes held until an action of a stage that does not exist.
GPIPE_API void account(Timeline& timeline, const std::vector<CellBytes>& stages);

/// Runs a program in simulated time by the executor's rules. Deterministic. Errors: std::invalid_argument if the costs
/// do not fit the program.
GPIPE_API Simulation simulate(const Program& program, const Costs& costs);

}  // namespace gpipe
