#pragma once

#include "gpipe/autograd/parameter_sinks.h"
#include "gpipe/autograd/random_scope.h"
#include "gpipe/run/pipeline.h"
#include "gpipe/runtime/exit.h"

namespace gpipe {

/// This thread's turn with a pipeline: its stages belong to the thread meanwhile. Turns of one thread nest. Errors of the
/// constructor: as Executor::check_caller().
class Turn {
 public:
  explicit Turn(Pipeline& pipeline) : lock_((pipeline.executor().check_caller(), pipeline.calls().turn)) {}

 private:
  const std::lock_guard<std::recursive_mutex> lock_;
};

/// One forward, step, backward or collective, as a transaction.
///
///   return in_call(pipeline, [&](Call& call) { return call.agree({.key = {.name = "largest"}, .number = number}).largest; });
///
/// Thread safety: used by the thread that made it.
class Call {
 public:
  /// Waits until no other call runs. Errors: std::runtime_error within another call of this thread, as of a signal handler
  /// that runs while step() waits.
  explicit Call(Pipeline& pipeline);
  ~Call();

  /// Notes the state of the stages, and draws the seed. `sinks`: per stage.
  void save(const std::vector<ParameterSinks>& sinks);
  /// The seed that save() has drawn.
  std::uint64_t seed() const { return draw_->seed(); }
  /// Agrees on the call with the other ranks. Errors: as Team::agree().
  Agreement agree(Proposal proposal);
  /// Marks the call as agreed: from now on an error of this rank fails the other ranks too.
  void start() { has_started_ = true; }

  /// Makes the call throw on the other ranks too, and restores what save() has noted. REQUIRES: an exception is being
  /// handled, and the call's cells are gone.
  void fail() noexcept;

 private:
  void report() noexcept;

  const ExitGuard exit_guard_;
  Pipeline& pipeline_;
  const Turn turn_;
  std::vector<StageState::Saved> before_;  // per stage
  std::optional<SeedDraw> draw_;
  bool has_answered_ = false;  // the other ranks know whether this rank makes the call
  bool has_started_ = false;
  StepKey key_;  // the proposal
};

/// Returns run(call) of a new call. If that throws, the call fails.
template <typename F>
auto in_call(Pipeline& pipeline, F run) {
  Call call(pipeline);
  try {
    return run(call);
  } catch (...) {
    call.fail();
    throw;
  }
}

}  // namespace gpipe
