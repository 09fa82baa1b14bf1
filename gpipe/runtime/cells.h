#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "gpipe/schedule/action.h"

namespace gpipe {

/// Bytes in use: now, and most at once since they were asked for last.
struct Bytes {
  std::int64_t live = 0;
  std::int64_t peak = 0;
};

/// What the executor drives: the cells of one mini-batch. The executor decides when, the cells do the work; data goes
/// between cells in slots of theirs that need no lock, because an edge's put happens before its take.
class Cells {
 public:
  virtual ~Cells() = default;

  /// Called once a run on each worker's thread: sets up the thread (devices, streams, grad mode), calls run_actions() once,
  /// which runs that worker's actions, and restores the thread. run_actions() does not throw. May throw.
  virtual void work(int worker, absl::FunctionRef<void()> run_actions) = 0;

  /// Performs one action on its worker's thread: its in-edges have been taken, its out-edges are put when it returns.
  /// May throw.
  virtual void run(const Action& action) = 0;

  /// What a worker has allocated; asked on its thread around each action of a run with a timeline.
  virtual Bytes bytes(int /*worker*/) { return {}; }
};

}  // namespace gpipe
