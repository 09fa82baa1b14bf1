#pragma once

#include <memory>
#include <optional>

#include "gpipe/autograd/saved_buffers.h"
#include "gpipe/autograd/stage.h"

namespace gpipe {

/// The state that a checkpointed cell's layers read and write, so that its recompute finds what its forward found. Used
/// by one thread at a time.
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

  /// Gives the layers the forward's buffers, and remembers the present ones and the parameters that layers write to.
  /// Unless `retain_graph`, this is the last recompute.
  void begin_recompute(bool retain_graph);
  /// Restores what begin_recompute() remembered. Call after the backward: a graph may have saved what the recompute made
  /// of the buffers. Does nothing unless a recompute has begun.
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
