#include "gpipe/run/step_loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <numeric>

#include "gpipe/base/checks.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

// Returns aliases of the tensors whose gradients become 0, also where they are NaN, if the weight is 0.
Value weighted_gradients(const Value& output, const at::Tensor& weight) {
  auto tensors = output.tensors();
  for (auto& tensor : tensors) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    tensor = at::alias(tensor);
    tensor.register_hook([weight](const at::Tensor& gradient) {
      return gradient.defined() ? gradient.masked_fill((weight == 0).to(gradient.device()), 0) : gradient;
    });
  }
  return {output.form(), std::move(tensors)};
}

}  // namespace

at::Tensor call_loss(const LossFunction& function, const Value& output, const Parcel& target) {
  auto loss = function(output, target.value());
  if (target.changed()) throw_error("the loss function changed its target in place; change a clone instead");
  if (!loss.defined()) {
    refuse_argument("the loss function returned an undefined tensor; return a floating-point scalar");
  }
  if (loss.dim() != 0 || !loss.is_floating_point()) {
    refuse_argument("the loss function returned a tensor of shape ", c10::str(loss.sizes()), " and type ",
                    c10::str(loss.dtype()), "; return a floating-point scalar");
  }
  const bool differentiable =
      std::ranges::any_of(output.tensors(), [](const auto& t) { return t.defined() && t.requires_grad(); });
  if (at::GradMode::is_enabled() && differentiable && !loss.requires_grad()) {
    refuse_argument(
        "the loss does not depend on the model's output in a differentiable way; compute it from the output without "
        "detach() or no_grad");
  }
  return loss;
}

at::Tensor join_losses(const std::vector<at::Tensor>& losses, const std::vector<double>& weights) {
  at::NoGradGuard no_grad;
  at::Tensor sum;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (weights[i] == 0) continue;  // 0 * NaN is NaN
    sum = sum.defined() ? sum.add(losses[i], weights[i]) : losses[i].mul(weights[i]);
  }
  return sum;
}

StepLoss::StepLoss(Pipeline& pipeline, LossFunction function, StepOptions options, std::vector<Parcel> targets,
                   const std::vector<std::int64_t>& sizes)
    : pipeline_(pipeline),
      function_(std::move(function)),
      options_(std::move(options)),
      weights_(sizes.size()),
      targets_(pipeline, std::move(targets), pipeline.stages().back().device),
      losses_(sizes.size()) {
  if (!pipeline.is_here(pipeline.count() - 1)) return;
  const auto counts = counts_of(options_, targets_.parcels());
  const auto on_device = std::ranges::find_if_not(counts, &at::Tensor::is_cpu);
  if (on_device == counts.end() || pipeline.team().replicas() > 1) {
    weights_ = loss_weights(options_, sizes, counts);
    return;
  }
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> together;
  for (const auto& count : counts) together.push_back(count.to(on_device->device()));
  auto shares = at::stack(together);
  shares = shares / shares.sum();
  std::vector<Parcel> parcels(sizes.size());
  for (std::size_t i = 0; i < sizes.size(); ++i) parcels[i].add(shares[static_cast<std::int64_t>(i)], false);
  shares_on_device_.emplace(pipeline, std::move(parcels), pipeline.stages().back().device);
  shares_.resize(sizes.size());
}

double StepLoss::weight() const {
  return shares_on_device_ ? 1 : std::accumulate(weights_.begin(), weights_.end(), 0.0);
}

void StepLoss::normalize(double total) { normalize_weights(weights_, total, *options_.reduction()); }

void StepLoss::begin_comparison() {
  if (!options_.check() || !pipeline_.is_here(pipeline_.count() - 1) || losses_.size() == 1) return;
  comparison_ = LossComparison::begin(function_, options_.count(), targets_.parcels());
}

at::Tensor StepLoss::compute(int micro_batch, const Value& output, Outputs& outputs) {
  if (keeps_outputs()) {
    Parcel kept;
    kept.add_leaving(output);
    outputs.add(micro_batch, std::move(kept));
  }
  auto target = targets_.receive(micro_batch);
  at::Tensor share;
  if (shares_on_device_) share = shares_on_device_->receive(micro_batch).tensors.front();
  const auto loss = call_loss(function_, share.defined() ? weighted_gradients(output, share) : output, target);
  // The loss of torch.mse_loss has memory for a number per element.
  const bool is_alone = !has_plain_memory(loss) || loss.storage().nbytes() == loss.itemsize();
  losses_[micro_batch] = is_alone ? loss.variable_data() : copy_of(loss.detach());
  outputs.note_device(losses_[micro_batch]);
  if (share.defined()) shares_[micro_batch] = share.to(loss.device());
  if (comparison_ && comparison_->add(micro_batch, output, std::move(target))) comparison_->run(losses_, weights());
  return loss;
}

at::Tensor StepLoss::gradient(int micro_batch) const {
  const auto options = losses_[micro_batch].options();
  if (shares_on_device_) return shares_[micro_batch].mul(options_.scale()).to(options);
  const double weight = weights_[micro_batch];
  if (weight == 0) return {};  // 0 * NaN would be NaN
  return at::scalar_tensor(weight * options_.scale(), options);
}

at::Tensor StepLoss::join() {
  targets_.await_copies();
  if (comparison_) comparison_->note();
  comparison_.reset();
  auto losses = std::exchange(losses_, {});
  for (const auto* list : {&losses, &shares_}) {
    for (const auto& each : *list) use_on_current_stream(each);
  }
  if (!shares_on_device_) return join_losses(losses, weights_);
  const auto type = losses.front().scalar_type();
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    losses[i] = losses[i].to(at::kDouble).mul(shares_[i]).masked_fill(shares_[i] == 0, 0);
  }
  return join_losses(losses, std::vector<double>(losses.size(), 1)).to(type);
}

// Waits for the shares on a device.
std::vector<double> StepLoss::weights() const {
  if (!shares_on_device_) return weights_;
  std::vector<double> weights;
  for (const auto& share : shares_) weights.push_back(share.item<double>());
  return weights;
}

}  // namespace gpipe
