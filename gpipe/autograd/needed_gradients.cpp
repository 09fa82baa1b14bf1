#include "gpipe/autograd/needed_gradients.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

bool differentiable(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
}

}  // namespace

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
      throw std::runtime_error(
          "[gpipe] an output of a stage needs a gradient in this recompute, but needed none in the stage's earlier "
          "forwards; repeat the call: from now on every floating-point output of the stage gets a gradient");
    }
  }
}

}  // namespace gpipe
