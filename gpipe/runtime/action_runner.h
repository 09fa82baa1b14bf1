#pragma once

#include <exception>
#include <optional>

#include "absl/functional/function_ref.h"
#include "gpipe/schedule/action.h"

namespace gpipe {

/// Bytes in use: now, and the peak since the last query.
struct Bytes {
  std::int64_t live = 0;
  std::int64_t peak = 0;
};

/// The first error of a run.
struct Failure {
  std::exception_ptr error;
  /// The action that threw; std::nullopt if the error came from a worker's set-up or from `poll`.
  std::optional<Action> action = std::nullopt;
  int worker = -1;  ///< whose thread failed; -1: the caller's, in `poll`
};

/// Runs the actions of a program. The executor decides when an action runs. Implementations can pass data between
/// actions without locks, because an edge's put happens before its take.
class ActionRunner {
 public:
  virtual ~ActionRunner() = default;

  /// Called once per run on each worker's thread. Sets up the thread (device, stream, grad mode), calls run_actions(),
  /// which does not throw, exactly once, and restores the thread. Can throw.
  virtual void on_worker(int worker, absl::FunctionRef<void()> run_actions) = 0;

  /// Calls a function once and measures it: the span of the action in a timeline.
  using Measure = absl::FunctionRef<void(absl::FunctionRef<void()>)>;
  /// Runs an action on its worker's thread. Receives and sends outside of `measure`. The executor takes the action's
  /// edges between workers of this process before this call and puts them after it. Can throw.
  virtual void run(const Action& action, Measure measure) = 0;

  /// Called once when a run fails, on the thread that failed. run() must not wait for other processes any longer then.
  virtual void cancel(const Failure& /*failure*/) noexcept {}

  /// Returns the bytes that a worker has allocated. Called on the worker's thread before and after each action of a run
  /// with a timeline.
  virtual Bytes bytes(int /*worker*/) { return {}; }
};

}  // namespace gpipe
