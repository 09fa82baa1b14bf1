#include "gpipe/run/loss_check.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpipe/base/checks.h"
#include "gpipe/run/micro_batch.h"
#include "gpipe/run/step_loss.h"

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

Value clone_of(const Parcel& parcel) { return clone_of(Value(parcel.form, parcel.tensors)); }

std::int64_t samples_of(const Parcel& target) { return target.tensors.front().size(0); }

double epsilon_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return std::ldexp(1.0, -52);
    case at::kHalf:
      return std::ldexp(1.0, -10);
    case at::kBFloat16:
      return std::ldexp(1.0, -7);
    default:
      return std::ldexp(1.0, -23);
  }
}

}  // namespace

LossCheck check_loss(const LossFunction& loss, const Value& output, const Value& target, std::int64_t chunks,
                     const StepOptions& options) {
  at::NoGradGuard no_grad;
  const auto samples = batch_size(output, "output");
  check_loss_arguments(loss, target, samples, options);
  const auto completed = complete(options, loss);
  const auto sizes = micro_batch_sizes(samples, chunks, /*split_size=*/0);
  const auto outputs = scatter(output, sizes);
  const auto targets = scatter(target, sizes);
  std::vector<at::Tensor> losses;
  for (std::size_t i = 0; i < sizes.size(); ++i) losses.push_back(call_loss(loss, clone_of(outputs[i]), targets[i]));
  const auto whole = call_loss(loss, clone_of(output), scatter(target, {samples}).front());
  auto weights = loss_weights(completed, sizes, targets);
  normalize(weights, std::accumulate(weights.begin(), weights.end(), 0.0), *completed.reduction());
  return {whole.item<double>(), join_losses(losses, weights).item<double>()};
}

LossComparison::LossComparison(LossFunction function, int micro_batches)
    : function_(std::move(function)),
      left_(micro_batches),
      outputs_(micro_batches),
      targets_(micro_batches),
      losses_(micro_batches) {}

void LossComparison::add(std::size_t micro_batch, const Value& output, Parcel target, const at::Tensor& loss) {
  auto& kept = outputs_[micro_batch];
  kept.form = output.form();
  for (const auto& tensor : output.tensors()) {
    kept.add(tensor.defined() ? tensor.detach() : tensor, /*gradient_wanted=*/false);
  }
  targets_[micro_batch] = std::move(target);
  losses_[micro_batch] = loss;
  if (--left_ > 0) return;
  compare();
  outputs_.clear();
  targets_.clear();
}

void LossComparison::compare() const {
  at::NoGradGuard no_grad;
  double whole = 0;
  double sum = 0;
  double mean = 0;
  try {
    if (!can_join()) return;
    const auto target = gather(targets_).value;
    const auto samples = batch_size(target);
    whole = call_loss(function_, gather(outputs_).value, scatter(target, {samples}).front()).item<double>();
    double magnitude = 0;
    for (std::size_t i = 0; i < losses_.size(); ++i) {
      const double loss = losses_[i].item<double>();
      const double share = static_cast<double>(samples_of(targets_[i])) / static_cast<double>(samples);
      sum += loss;
      mean += loss * share;
      magnitude += std::abs(loss) * share;
    }
    const double epsilon = this->epsilon();
    const double tolerance = 2 * std::pow(epsilon, 2.0 / 3) * std::max(std::abs(whole), magnitude) + 8 * epsilon;
    if (!std::isfinite(whole) || std::abs(whole - mean) <= tolerance || !repeats()) return;
  } catch (...) {
    return;  // the loss function does not take a whole mini-batch
  }
  refuse_argument(absl::StrCat(
      "the loss of the whole mini-batch is ", whole, ", but the micro-batches give ", mean,
      ", the mean of their losses weighted by samples, and their sum is ", sum,
      "; pass reduction for a sum, or count, which returns what a micro-batch's mean is divided by; use forward() and "
      "backward() if the loss does not decompose over samples; pass check = false to train with the mean all the "
      "same"));
}

// Whether dimension 0 of all outputs is the batch.
bool LossComparison::can_join() const {
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const auto samples = samples_of(targets_[i]);
    for (const auto& tensor : outputs_[i].tensors) {
      if (tensor.defined() && (tensor.dim() == 0 || tensor.size(0) != samples)) return false;
    }
  }
  return true;
}

// That of the least precise type.
double LossComparison::epsilon() const {
  double epsilon = epsilon_of(losses_.front().scalar_type());
  for (const auto& tensor : outputs_.front().tensors) {
    if (tensor.defined() && tensor.is_floating_point()) epsilon = std::max(epsilon, epsilon_of(tensor.scalar_type()));
  }
  return epsilon;
}

// Whether the loss function gives the same losses again. Not if it draws random numbers, has a state, or changes the output.
bool LossComparison::repeats() const {
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const double before = losses_[i].item<double>();
    const double again = call_loss(function_, clone_of(outputs_[i]), targets_[i]).item<double>();
    if (again != before && !(std::isnan(again) && std::isnan(before))) return false;
  }
  return true;
}

}  // namespace gpipe
