#include "gpipe/run/step_loss.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

// A loss function may change the output in place.
Value clone_of(const Value& value) {
  auto tensors = value.tensors();
  for (auto& tensor : tensors) {
    if (tensor.defined()) tensor = tensor.clone();
  }
  return {value.form(), std::move(tensors)};
}

std::int64_t samples_of(const Parcel& target) { return target.tensors.front().size(0); }

double epsilon_of(at::ScalarType type) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "epsilon_of",
                                         [] { return static_cast<double>(std::numeric_limits<scalar_t>::epsilon()); });
}

// Returns the micro-batches' weights, before normalize().
std::vector<double> loss_weights(const StepOptions& options, const std::vector<std::int64_t>& sizes,
                                 const std::vector<Parcel>& targets) {
  if (options.reduction() == Reduction::kSum) return std::vector<double>(sizes.size(), 1);
  std::vector<double> weights(sizes.begin(), sizes.end());
  for (std::size_t i = 0; options.count() && i < weights.size(); ++i) {
    const double count = weights[i] = options.count()(targets[i].value());
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

// Calls a loss function on one micro-batch.
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

// Whether dimension 0 of all outputs is the batch.
bool can_join(const std::vector<Parcel>& outputs, const std::vector<Parcel>& targets) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto samples = samples_of(targets[i]);
    for (const auto& tensor : outputs[i].tensors) {
      if (tensor.defined() && (tensor.dim() == 0 || tensor.size(0) != samples)) return false;
    }
  }
  return true;
}

// The epsilon of the least precise type.
double largest_epsilon(const at::Tensor& loss, const Parcel& output) {
  double epsilon = epsilon_of(loss.scalar_type());
  for (const auto& tensor : output.tensors) {
    if (tensor.defined() && tensor.is_floating_point()) epsilon = std::max(epsilon, epsilon_of(tensor.scalar_type()));
  }
  return epsilon;
}

struct LossAndGradients {
  double loss;
  std::vector<at::Tensor> gradients;  // for the floating-point tensors of the output
};

// Calls a loss function on a copy of the output. REQUIRES: grad mode.
LossAndGradients differentiate(const LossFunction& function, const Value& output, const Parcel& target) {
  auto tensors = output.tensors();
  std::vector<at::Tensor> wanted;
  for (auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    tensor = tensor.detach();
    if (tensor.is_floating_point()) wanted.push_back(tensor.requires_grad_());
  }
  const auto loss = call_loss(function, clone_of({output.form(), std::move(tensors)}), target);
  if (wanted.empty()) return {loss.item<double>(), {}};
  auto gradients = torch::autograd::grad({loss}, wanted, {}, std::nullopt, false, /*allow_unused=*/true);
  for (std::size_t k = 0; k < wanted.size(); ++k) {
    if (!gradients[k].defined()) gradients[k] = at::zeros_like(wanted[k]);
  }
  return {loss.item<double>(), std::move(gradients)};
}

// Compares the loss of the whole mini-batch, and its gradients, with the weighted losses of the micro-batches. The
// losses alone differ too little if those of the micro-batches are much the same. Errors: std::invalid_argument.
void compare(const LossFunction& function, const std::vector<Parcel>& outputs, const std::vector<Parcel>& targets,
             const std::vector<at::Tensor>& losses, const std::vector<double>& weights) {
  const at::AutoGradMode grad_mode(true);
  double whole = 0;
  double sum = 0;
  double mean = 0;
  double gap = 0;  // between the gradients, relative
  try {
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    if (total == 0 || !can_join(outputs, targets)) return;
    std::vector<std::int64_t> sizes;
    for (const auto& each : targets) sizes.push_back(samples_of(each));
    const auto target = gather(targets, sizes, "").value;
    const auto all =
        differentiate(function, gather(outputs, sizes, "").value, scatter(target, {batch_size(target)}).front());
    whole = all.loss;
    double magnitude = std::abs(whole);
    std::vector<std::vector<at::Tensor>> parts(all.gradients.size());
    for (std::size_t i = 0; i < losses.size(); ++i) {
      const double loss = losses[i].item<double>();
      const auto [again, gradients] = differentiate(function, outputs[i].value(), targets[i]);
      if (again != loss && !(std::isnan(again) && std::isnan(loss))) return;  // it draws, has a state or writes
      const double share = weights[i] / total;
      sum += loss;
      if (share != 0) mean += loss * share;  // 0 * NaN is NaN
      magnitude = std::max(magnitude, std::abs(loss));
      for (std::size_t k = 0; k < parts.size(); ++k) {
        parts[k].push_back(share == 0 ? at::zeros_like(gradients[k]) : gradients[k] * share);
      }
    }
    const auto square = [](const at::Tensor& gradient) {
      return std::pow(at::norm(gradient, 2, at::toOpMathType(gradient.scalar_type())).item<double>(), 2);
    };
    double off = 0;
    double square_of_all = 0;
    for (std::size_t k = 0; k < parts.size(); ++k) {
      off += square(all.gradients[k] - at::cat(parts[k]));
      square_of_all += square(all.gradients[k]);
    }
    gap = std::sqrt(off / square_of_all);
    const double epsilon = largest_epsilon(losses.front(), outputs.front());
    const double tolerance = 2 * std::pow(epsilon, 2.0 / 3) * magnitude + 8 * epsilon;
    if (!std::isfinite(whole) || !std::isfinite(off) ||
        (std::abs(whole - mean) <= tolerance && off <= epsilon * square_of_all))
      return;
  } catch (...) {
    return;  // the loss function does not take a whole mini-batch
  }
  refuse_argument(
      "the loss of the whole mini-batch is ", whole, ", but the micro-batches give ", mean, " (their sum is ", sum,
      ") and gradients that are ", 100 * gap,
      " % off; if the loss ignores some targets, pass count, which returns what a micro-batch's mean is divided by; if "
      "it is a sum, pass reduction; if it does not decompose over samples, use forward() and backward(); turn check "
      "off to train so all the same");
}

// Whether the micro-batches have unequal shares of what losses ignore: negative numbers in integer targets, and the
// zeros of masks.
bool ignores_unevenly(const std::vector<Parcel>& targets) {
  for (std::size_t k = 0; k < targets.front().tensors.size(); ++k) {
    std::optional<double> first;
    for (const auto& target : targets) {
      const auto& tensor = target.tensors[k];
      const bool is_mask = tensor.defined() && tensor.scalar_type() == at::kBool;
      const bool is_signed = tensor.defined() && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) &&
                             at::isSignedType(tensor.scalar_type());
      if (tensor.numel() == 0 || !(is_mask || is_signed)) break;
      const auto ignored = is_mask ? tensor.logical_not() : tensor.lt(0);
      const double share = ignored.sum().item<double>() / static_cast<double>(tensor.numel());
      if (share != first.value_or(share)) return true;
      first = share;
    }
  }
  return false;
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
  auto weights = loss_weights(completed, sizes, targets);
  normalize(weights, std::accumulate(weights.begin(), weights.end(), 0.0), *completed.reduction());
  return {whole.item<double>(), join_losses(losses, weights).item<double>()};
}

// On ranks without the last stage, the targets do not count.
StepLoss::StepLoss(Pipeline& pipeline, LossFunction function, StepOptions options, std::vector<Parcel> targets,
                   const std::vector<std::int64_t>& sizes)
    : pipeline_(pipeline),
      function_(std::move(function)),
      options_(std::move(options)),
      weights_(pipeline.is_here(pipeline.count() - 1) ? loss_weights(options_, sizes, targets)
                                                      : std::vector<double>(sizes.size())),
      targets_(pipeline, std::move(targets), pipeline.stages().back().device),
      losses_(sizes.size()) {}

double StepLoss::weight() const { return std::accumulate(weights_.begin(), weights_.end(), 0.0); }

void StepLoss::normalize(double total) { gpipe::normalize(weights_, total, *options_.reduction()); }

void StepLoss::begin_comparison() {
  if (!options_.check() || !pipeline_.is_here(pipeline_.count() - 1) || losses_.size() == 1) return;
  const auto kind = 2 * function_.kind.value_or(function_.target_type().hash_code());
  const auto& compared = pipeline_.compared_losses();
  const bool is_first = !compared.contains(kind);
  const auto& target = targets_.parcels().front().tensors.front();
  // Later targets on other devices are not looked at, because the caller would wait for them in each step.
  if (compared.contains(kind + 1) || !(is_first || target.is_cpu())) return;
  const bool unevenly = ignores_unevenly(targets_.parcels());
  if (!unevenly && !is_first) return;
  comparison_ = Comparison{function_, kind + (unevenly ? 1 : 0), static_cast<int>(losses_.size()),
                           std::vector<Parcel>(losses_.size()), std::vector<Parcel>(losses_.size())};
}

at::Tensor StepLoss::compute(int micro_batch, const Value& output, Outputs& outputs) {
  if (keeps_outputs()) {
    Parcel kept;
    kept.add_leaving(output);
    outputs.add(micro_batch, std::move(kept));
  }
  auto target = targets_.receive(micro_batch);
  auto loss = call_loss(function_, output, target);
  losses_[micro_batch] = loss.variable_data();
  outputs.note_device(losses_[micro_batch]);
  if (comparison_) {
    comparison_->outputs[micro_batch].add_leaving(output);
    comparison_->targets[micro_batch] = std::move(target);
    if (--comparison_->left == 0) {
      compare(comparison_->function, comparison_->outputs, comparison_->targets, losses_, weights_);
      comparison_->outputs.clear();
      comparison_->targets.clear();
    }
  }
  return loss;
}

at::Tensor StepLoss::gradient(int micro_batch) const {
  const double weight = weights_[micro_batch];
  if (weight == 0) return {};  // 0 * NaN would be NaN
  return at::scalar_tensor(weight * options_.scale(), losses_[micro_batch].options());
}

at::Tensor StepLoss::join() {
  targets_.await_copies();
  if (comparison_) pipeline_.compared_losses().insert(comparison_->kind);
  comparison_.reset();
  const auto losses = std::exchange(losses_, {});
  for (const auto& loss : losses) use_on_current_stream(loss);
  return join_losses(losses, weights_);
}

}  // namespace gpipe
