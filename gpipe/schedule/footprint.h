#pragma once

#include <cstdint>
#include <vector>

#include "gpipe/schedule/timeline.h"

namespace gpipe {

/// Bytes that an action leaves behind, and the action of the same micro-batch at whose end they are freed.
struct Held {
  /// Instead of a stage: freed when the last forward of the step has run, as what the caller takes; or not in the step.
  static constexpr int kForwards = -1;
  static constexpr int kForEver = -2;

  std::int64_t bytes = 0;
  /// F, R, I: the action that sends gradients (B, where the backward is not split), or W: the cell's last action.
  Kind until = Kind::W;
  int stage = 0;
};

/// Bytes that one action allocates.
struct ActionBytes {
  std::int64_t extra = 0;  ///< in use while it runs, at most, above what was before
  std::vector<Held> held;  ///< in use when it has run, above what was before

  std::int64_t kept() const;
};

/// What the cells of a stage allocate, each for one micro-batch.
struct CellBytes {
  ActionBytes forward;    ///< an F that builds its graph
  ActionBytes stored;     ///< an F whose cell is recomputed
  ActionBytes recompute;  ///< R
  ActionBytes backward;   ///< B, or I
  /// What the first backward has in use at most, above what was before, if that is more: it makes the sums.
  std::int64_t first_backward_extra = 0;
  /// Sums of the parameters' gradients, in use from the first backward on.
  std::int64_t parameters = 0;
};

/// Says of every span of a timeline, traced or simulated, what its worker has in use, from what each stage's cells
/// allocate. Errors: std::invalid_argument for fewer stages than the timeline has, or for bytes that are held until an
/// action of a stage that there is not.
void account(Timeline& timeline, const std::vector<CellBytes>& stages);

}  // namespace gpipe
