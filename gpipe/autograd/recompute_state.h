#pragma once

#include <memory>
#include <optional>

#include "gpipe/autograd/saved_buffers.h"
#include "gpipe/autograd/stage.h"

namespace gpipe {

/// The buffers and parameters that a checkpointed cell's layers write to. Gives its recompute the values that its forward
/// found. Used by one thread at a time.
class RecomputeState {
 public:
  /// Saves the stage's buffers. Call before the forward. Both arguments must outlive this.
  RecomputeState(Stage& stage, const ParameterSinks& sinks);
  /// Ends a recompute whose backward has failed or never ran.
  ~RecomputeState();
  RecomputeState(const RecomputeState&) = delete;
  RecomputeState& operator=(const RecomputeState&) = delete;

  /// Call after the forward. Errors: see SavedBuffers::learn().
  void learn_habits() { before_forward_->learn(stage_.habits); }

  /// Saves the present buffers, and the parameters that layers write to. Then gives the layers the forward's buffers.
  /// Unless `retain_graph`, this is the last recompute.
  void begin_recompute(bool retain_graph);
  /// Restores the values that begin_recompute() saved. Call after the backward, because the graph may use the buffers as
  /// the recompute left them. Does nothing unless a recompute has begun.
  void end_recompute();

 private:
  struct Present {
    SavedBuffers buffers;
    SavedTensors parameters;
  };

  Stage& stage_;
  const ParameterSinks& sinks_;
  std::optional<SavedBuffers> before_forward_;  // until the last recompute
  std::unique_ptr<const Present> present_;
};

}  // namespace gpipe
