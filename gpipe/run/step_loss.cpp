#include "gpipe/run/step_loss.h"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/TypeCast.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "gpipe/base/checks.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

// Returns what the micro-batches' losses are the means of; nothing if these are the samples, or for sums.
std::vector<at::Tensor> counts_of(const StepOptions& options, const std::vector<Parcel>& targets) {
  std::vector<at::Tensor> counts;
  if (options.reduction() == Reduction::kSum || !options.count()) return counts;
  at::NoGradGuard no_grad;
  for (const auto& target : targets) {
    const at::Tensor count = options.count()(target.value());
    if (!count.defined() || count.numel() != 1) {
      refuse_argument("count returned ", count.defined() ? c10::str("a tensor of shape ", count.sizes()) : "no tensor",
                      " for micro-batch ", counts.size(), "; return a number, or a tensor of one element");
    }
    counts.push_back(count.detach().reshape({}).to(at::kDouble));
  }
  return counts;
}

// Returns the micro-batches' weights, before normalize(). Waits for the counts.
std::vector<double> loss_weights(const StepOptions& options, const std::vector<std::int64_t>& sizes,
                                 const std::vector<at::Tensor>& counts) {
  if (options.reduction() == Reduction::kSum) return std::vector<double>(sizes.size(), 1);
  std::vector<double> weights(sizes.begin(), sizes.end());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const double count = weights[i] = counts[i].item<double>();
    if (std::isfinite(count) && count >= 0) continue;
    refuse_argument("count returned ", std::to_string(count), " for micro-batch ", i,
                    "; return a finite number that is not negative");
  }
  return weights;
}

// Divides the weights of a mean by `total`, the sum of the mini-batch's.
void normalize(std::vector<double>& weights, double total, Reduction reduction) {
  if (reduction == Reduction::kSum) return;
  if (total == 0) {
    refuse_argument(
        "every target is ignored (count is 0 for every micro-batch), or there are no samples; skip this mini-batch");
  }
  for (auto& weight : weights) weight /= total;
}

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

Count::Count(double number) : at::Tensor(at::scalar_tensor(number, at::kDouble)) {}

CountFunction count_of_classes(at::Tensor weight, std::int64_t ignore_index) {
  return [weight = std::move(weight), ignore_index](const Value& value) -> Count {
    const auto target = value.tensor();
    if (target.is_floating_point()) return static_cast<double>(target.size(0));  // probabilities: a mean over samples
    // As the number of a class of type uint8, -100 would be 156.
    const bool ignores = target.scalar_type() != at::kByte || !c10::overflows<std::uint8_t>(ignore_index, true);
    if (!weight.defined())
      return ignores ? target.ne(ignore_index).count_nonzero() : Count(static_cast<double>(target.numel()));
    const auto ignored = ignores ? target.eq(ignore_index) : at::zeros_like(target, at::kBool);
    const auto classes = target.masked_fill(ignored, 0).to(at::kLong).flatten();
    const auto weights = weight.detach().to(target.device()).index_select(0, classes);
    return weights.masked_fill(ignored.flatten(), 0).sum(at::toOpMathType(weights.scalar_type()));
  };
}

StepOptions complete(StepOptions options, const LossFunction& loss, const Value& target, std::int64_t samples) {
  if (!loss) refuse_argument("the loss function is empty; pass one");
  if (const auto targets = batch_size(target, "target"); targets != samples) {
    refuse_argument("the target has ", targets, " samples, but the input has ", samples, "; give as many");
  }
  for (const auto& tensor : target.tensors()) {
    if (tensor.requires_grad()) refuse_argument("a target requires grad, but step() gives it no gradient; detach it");
  }
  if (!std::isfinite(options.scale()) || options.scale() <= 0) {
    refuse_argument("scale must be finite and positive, but is ", options.scale());
  }
  if (options.count() && options.reduction() == Reduction::kSum) {
    refuse_argument("count weights a mean, but reduction is the sum; leave one of them out");
  }
  if (options.reduction() == Reduction::kSum) options.check(false);
  if (!options.count() && loss.reduction && options.reduction().value_or(*loss.reduction) == *loss.reduction) {
    options.reduction(loss.reduction).count(loss.count).check(false);
  }
  return options.reduction(options.reduction().value_or(Reduction::kMean));
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

LossCheck check_loss(const LossFunction& loss, const Value& output, const Value& target, std::int64_t chunks,
                     const StepOptions& options) {
  at::NoGradGuard no_grad;
  const auto samples = batch_size(output, "output");
  const auto completed = complete(options, loss, target, samples);
  const auto sizes = micro_batch_sizes(samples, chunks, /*split_size=*/0);
  const auto outputs = scatter(output, sizes);
  const auto targets = scatter(target, sizes);
  std::vector<at::Tensor> losses;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    losses.push_back(call_loss(loss, clone_of(outputs[i].value()), targets[i]));
  const auto whole = call_loss(loss, clone_of(output), scatter(target, {samples}).front());
  auto weights = loss_weights(completed, sizes, counts_of(completed, targets));
  normalize(weights, std::accumulate(weights.begin(), weights.end(), 0.0), *completed.reduction());
  return {whole.item<double>(), join_losses(losses, weights).item<double>()};
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

void StepLoss::normalize(double total) { gpipe::normalize(weights_, total, *options_.reduction()); }

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
  losses_[micro_batch] = loss.variable_data();
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
