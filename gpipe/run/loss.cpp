#include "gpipe/loss.h"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "gpipe/base/checks.h"
#include "gpipe/run/micro_batch.h"
#include "gpipe/run/step_loss.h"

namespace gpipe {
namespace {

Value value_of(const Parcel& parcel) { return {parcel.form, parcel.tensors}; }

double count_of(const StepOptions& options, const Parcel& target, std::size_t micro_batch) {
  const double count = options.count()(value_of(target));
  if (std::isfinite(count) && count >= 0) return count;
  refuse_argument("count returned " + std::to_string(count) + " for micro-batch " + std::to_string(micro_batch) +
                  "; return a finite number that is not negative");
}

}  // namespace

CountFunction count_of_classes(at::Tensor weight, std::int64_t ignore_index) {
  return [weight = std::move(weight), ignore_index](const Value& value) -> double {
    const auto target = value.tensor();
    if (target.is_floating_point()) return static_cast<double>(target.size(0));  // probabilities: a mean over samples
    const auto counted = target.masked_select(target.ne(ignore_index));
    if (!weight.defined()) return static_cast<double>(counted.numel());
    const auto weights = weight.detach().to(counted.device()).index_select(0, counted.to(at::kLong));
    return weights.sum(at::toOpMathType(weights.scalar_type())).item<double>();
  };
}

StepOptions complete(StepOptions options, const LossFunction& loss) {
  if (!options.count() && loss.reduction && options.reduction().value_or(*loss.reduction) == *loss.reduction) {
    options.reduction(loss.reduction).count(loss.count);
  }
  if (options.reduction() || options.count()) options.check(false);
  return options.reduction(options.reduction().value_or(Reduction::kMean));
}

void check_loss_arguments(const LossFunction& loss, const Value& target, std::int64_t samples,
                          const StepOptions& options) {
  if (!loss) refuse_argument("the loss function is empty; pass one");
  if (const auto targets = batch_size(target, "target"); targets != samples) {
    refuse_argument("the target has " + std::to_string(targets) + " samples, but the input has " +
                    std::to_string(samples));
  }
  for (const auto& tensor : target.tensors()) {
    if (tensor.requires_grad()) refuse_argument("a target requires grad, but step() gives it no gradient; detach it");
  }
  if (!std::isfinite(options.scale()) || options.scale() <= 0) {
    refuse_argument("scale must be finite and positive, but is " + std::to_string(options.scale()));
  }
  if (options.count() && options.reduction() == Reduction::kSum) {
    refuse_argument("count weights a mean, but reduction is the sum; leave one of them out");
  }
}

std::vector<double> loss_weights(const StepOptions& options, const std::vector<std::int64_t>& sizes,
                                 const std::vector<Parcel>& targets) {
  if (options.reduction() == Reduction::kSum) return std::vector<double>(sizes.size(), 1);
  std::vector<double> weights(sizes.begin(), sizes.end());
  if (options.count()) {
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = count_of(options, targets[i], i);
  }
  return weights;
}

void normalize(std::vector<double>& weights, double total, Reduction reduction) {
  if (reduction == Reduction::kSum) return;
  if (total == 0) {
    refuse_argument(
        "every target is ignored (count is 0 for every micro-batch), or there are no samples; skip this mini-batch");
  }
  for (auto& weight : weights) weight /= total;
}

at::Tensor call_loss(const LossFunction& function, const Value& output, const Parcel& target) {
  auto loss = function(output, value_of(target));
  if (target.changed()) {
    throw std::runtime_error("[gpipe] the loss function changed its target in place; change a clone instead");
  }
  if (!loss.defined())
    refuse_argument("the loss function returned an undefined tensor; return a floating-point scalar");
  if (loss.dim() != 0 || !loss.is_floating_point()) {
    std::ostringstream message;
    message << "the loss function returned a tensor of shape " << loss.sizes() << " and type " << loss.dtype()
            << "; return a floating-point scalar";
    refuse_argument(message.str());
  }
  const auto& tensors = output.tensors();
  const bool differentiable =
      std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.defined() && t.requires_grad(); });
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

}  // namespace gpipe
