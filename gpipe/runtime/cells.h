#pragma once

#include <cstdint>
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
  std::optional<Action> action;
};

/// The cells of one mini-batch, as the executor calls them. The executor decides when an action runs; this class runs
/// it. Implementations can pass data between cells without locks, because an edge's put happens before its take.
class Cells {
 public:
  virtual ~Cells() = default;

  /// Called once per run on each worker's thread. Sets up the thread (device, stream, grad mode), calls run_actions()
  /// exactly once, and restores the thread. run_actions() runs the worker's actions and does not throw. Can throw.
  virtual void work(int worker, absl::FunctionRef<void()> run_actions) = 0;

  /// Performs one action on its worker's thread. The executor takes the action's edges before this call and puts its
  /// edges after it. Can throw.
  virtual void run(const Action& action) = 0;

  /// Receive what the action takes from workers in other processes, and send what it puts for them. Called on its worker's
  /// thread, before and after run(). Can wait and can throw.
  virtual void take(const Action& /*action*/) {}
  virtual void put(const Action& /*action*/) {}

  /// Called once when a run fails, on the thread that failed. take() must not wait any longer then.
  virtual void cancel(const Failure& /*failure*/) noexcept {}

  /// Returns the bytes that a worker has allocated. Called on the worker's thread before and after each action of a run
  /// with a timeline.
  virtual Bytes bytes(int /*worker*/) { return {}; }
};

}  // namespace gpipe
