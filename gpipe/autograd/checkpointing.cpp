#include "gpipe/autograd/checkpointing.h"

#include <algorithm>

#include "gpipe/autograd/stage.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

using InPlace = Stage::InPlace;

// Copies the activation and the skips. Borrowed parameters, which follow, do not change during a call.
std::vector<Parcel> copies_of(std::vector<Parcel> parcels, const Stage& stage) {
  for (std::size_t p = 0; p < 1 + stage.skips_in.size(); ++p) {
    for (auto& tensor : parcels[p].tensors) {
      if (tensor.defined()) tensor = copy_of(tensor);
    }
    parcels[p].renew_versions();
  }
  return parcels;
}

bool changed(const std::vector<Parcel>& parcels) { return std::ranges::any_of(parcels, &Parcel::changed); }

[[noreturn]] void fail(const Stage& stage, const std::string& when) {
  throw_error("the input of stage ", stage.index, " was changed in place ", when,
              " for the first time, so the stage cannot be recomputed; repeat the call: from now on the stage stores "
              "copies of its input");
}

bool differentiable(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
}

}  // namespace

StoredInputs::StoredInputs(Stage& stage, const std::vector<Parcel>& inputs)
    : stage_(stage),
      stores_copies_(stage.in_place != InPlace::kNo),
      stored_(stores_copies_ ? copies_of(inputs, stage) : inputs) {
  for (const auto& parcel : inputs) {
    for (const auto& tensor : parcel.tensors) originals_.emplace_back(tensor);
  }
}

void StoredInputs::check_unchanged(const std::vector<Parcel>& inputs, const std::string& when) {
  if (!changed(inputs)) return;
  stage_.in_place = InPlace::kYes;
  if (!stores_copies_) fail(stage_, when);
}

std::vector<Parcel> StoredInputs::take(bool retain_graph) {
  if (changed(stored_)) {
    stage_.in_place = InPlace::kYes;
    fail(stage_, "between its forward and its recompute");
  }
  if (!retain_graph) return std::move(stored_);
  return stage_.in_place == InPlace::kNo ? stored_ : copies_of(stored_, stage_);
}

void StoredInputs::check_before_backward() {
  const auto originals = std::exchange(originals_, {});
  if (std::ranges::any_of(originals, &VersionWatch::changed)) {
    stage_.in_place = InPlace::kYes;
    if (!stores_copies_) fail(stage_, "during its recompute");
  } else if (stage_.in_place == InPlace::kUnknown) {
    stage_.in_place = InPlace::kNo;
  }
}

void NeededGradients::learn(std::vector<bool> sources, const std::vector<Parcel>& out) {
  sources_ = std::move(sources);
  wanted_.clear();
  for (const auto& parcel : out) wanted_.push_back(parcel.wants_gradient);
}

void NeededGradients::apply(std::vector<Parcel>& out) const {
  const bool any = std::find(sources_.begin(), sources_.end(), true) != sources_.end();
  for (std::size_t p = 0; p < out.size(); ++p) {
    const auto& tensors = out[p].tensors;
    const bool as_learned = !varies_ && wanted_[p].size() == tensors.size();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      out[p].wants_gradient[i] = differentiable(tensors[i]) && (as_learned ? wanted_[p][i] : any);
    }
  }
}

void NeededGradients::check(const std::vector<std::vector<bool>>& sent, const std::vector<Parcel>& recomputed) {
  for (std::size_t p = 0; p < sent.size(); ++p) {
    const auto& wants = recomputed[p].wants_gradient;
    for (std::size_t i = 0; i < std::min(sent[p].size(), wants.size()); ++i) {
      if (sent[p][i] || !wants[i]) continue;
      varies_ = true;
      throw_error(
          "an output of a stage needs a gradient in this recompute, but needed none in the stage's earlier forwards; "
          "repeat the call: from now on every floating-point output of the stage gets a gradient");
    }
  }
}

}  // namespace gpipe
