#include "gpipe/run/backward_gradients.h"

#include "absl/strings/str_cat.h"

namespace gpipe {

std::string describe_trained(const std::vector<ParameterSinks>& stages) {
  std::size_t count = 0;
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  std::vector<at::Tensor> own;
  for (const auto& sinks : stages) {
    own.insert(own.end(), sinks.own().begin(), sinks.own().end());
    for (std::size_t p = 0; p < sinks.all().size(); ++p) {
      count += sinks.has_sink()[p];
      const auto size = static_cast<std::uint64_t>(sinks.all()[p].numel());
      hash = (hash ^ (sinks.has_sink()[p] ? size + 1 : 0)) * 1099511628211u;
    }
  }
  return absl::StrCat("trains ", count, " parameters, whose sizes have the hash ", hash, ", of values with the hash ",
                      sample_hash(own));
}

BackwardGradients::BackwardGradients(Pipeline& pipeline, const std::vector<ParameterSinks>& sinks, int micro_batches)
    : sinks_(sinks), inputs_(micro_batches), backwards_left_(sinks.size(), micro_batches) {
  for (const auto& of_stage : sinks) sums_.emplace_back(of_stage.parameters().size());
  if (pipeline.team().replicas() == 1) return;
  std::vector<std::vector<at::Tensor>> parameters;
  for (const auto& of_stage : sinks) parameters.push_back(of_stage.parameters());
  reduction_ = std::make_unique<GradientReduction>(pipeline.team(), std::move(parameters));
}

void BackwardGradients::set_outputs(std::vector<Gradients> gradients, double share) {
  outputs_ = std::move(gradients);
  if (reduction_) {
    for (auto& of_micro_batch : outputs_) {
      for (auto& gradient : of_micro_batch) {
        if (gradient.defined()) gradient = share == 0 ? at::Tensor() : gradient * share;
      }
    }
  }
  for (const auto& gradient : outputs_.front()) {
    outputs_ready_.push_back(gradient.defined() ? record_event(gradient.device()) : nullptr);
  }
}

Gradients BackwardGradients::outputs(int micro_batch) {
  auto gradients = std::move(outputs_[micro_batch]);
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    if (gradients[k].defined()) wait(outputs_ready_[k], gradients[k].device());
  }
  return gradients;
}

GradientSums& BackwardGradients::sums(int stage) {
  sums_[stage].grow(sinks_[stage].parameters().size());  // a forward may have made a parameter
  return sums_[stage];
}

void BackwardGradients::end_backward(int stage) {
  if (reduction_ && --backwards_left_[stage] == 0) reduction_->send(stage, sums_[stage].take_unshared());
}

void BackwardGradients::add(const GradientsAside& aside) {
  if (!reduction_) aside.move_to(sums_);
}

BackwardGradients::Result BackwardGradients::take() {
  if (reduction_) return {std::move(inputs_), reduction_->take()};
  Result result{std::move(inputs_), {}};
  for (auto& sums : sums_) result.parameters.push_back(sums.take_unshared());
  return result;
}

}  // namespace gpipe
