#include "gpipe/autograd/recompute_state.h"

#include <utility>

namespace gpipe {

RecomputeState::RecomputeState(Stage& stage, const ParameterSinks& sinks)
    : stage_(stage), sinks_(sinks), before_forward_(std::in_place, stage, &stage.habits) {}

RecomputeState::~RecomputeState() {
  if (!present_) return;
  present_->buffers.restore_after_error();
  present_->parameters.restore_after_error();
}

void RecomputeState::begin_recompute(bool retain_graph) {
  present_ =
      std::make_unique<const Present>(Present{SavedBuffers(stage_, &stage_.habits), SavedTensors(sinks_.written())});
  before_forward_->restore();
  if (!retain_graph) before_forward_.reset();
}

void RecomputeState::end_recompute() {
  if (!present_) return;
  present_->buffers.restore();
  present_->parameters.restore();
  present_.reset();
}

}  // namespace gpipe
