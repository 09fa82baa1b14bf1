#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "gpipe/schedule/action.h"

namespace gpipe {

/// Bytes in use: now, and the peak since the last query.
struct Bytes {
  std::int64_t live = 0;
  std::int64_t peak = 0;
};

/// The cells of one mini-batch, as the executor calls them. The executor decides when an action runs; this class runs
/// it. Implementations pass data between cells without locks, because an edge's put happens before its take.
class Cells {
 public:
  virtual ~Cells() = default;

  /// Called once per run on each worker's thread. Sets up the thread (device, stream, grad mode), calls run_actions()
  /// exactly once, which runs the worker's actions and does not throw, and restores the thread. Can throw.
  virtual void work(int worker, absl::FunctionRef<void()> run_actions) = 0;

  /// Performs one action on its worker's thread. Its edges have been taken before; the executor puts its edges when
  /// this returns. Can throw.
  virtual void run(const Action& action) = 0;

  /// Returns what a worker has allocated. Called on the worker's thread before and after each action of a run with a
  /// timeline.
  virtual Bytes bytes(int /*worker*/) { return {}; }
};

}  // namespace gpipe
