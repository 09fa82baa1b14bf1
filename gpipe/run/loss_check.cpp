#include "gpipe/run/loss_check.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "gpipe/base/checks.h"
#include "gpipe/run/micro_batch.h"

namespace gpipe {
namespace {

constexpr std::size_t kMostCompared = 16;
constexpr std::int64_t kSample = 8192;

double epsilon_of(at::ScalarType type) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "epsilon_of",
                                         [] { return static_cast<double>(std::numeric_limits<scalar_t>::epsilon()); });
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
  std::vector<at::Tensor> gradients;  // of the loss times its weight, for the floating-point tensors of the output
};

// Calls a loss function on a copy of the output. REQUIRES: grad mode.
LossAndGradients differentiate(const LossFunction& function, const Value& output, const Parcel& target, double weight) {
  auto tensors = output.tensors();
  std::vector<at::Tensor> wanted;
  for (auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    tensor = tensor.detach();
    if (tensor.is_floating_point()) wanted.push_back(tensor.requires_grad_());
  }
  const auto loss = call_loss(function, clone_of({output.form(), std::move(tensors)}), target);
  std::vector<at::Tensor> gradients(wanted.size());
  if (weight != 0 && !wanted.empty()) {  // 0 * NaN is NaN
    const auto gradient = at::full_like(loss, weight);
    gradients = torch::autograd::grad({loss}, wanted, {gradient}, std::nullopt, false, /*allow_unused=*/true);
  }
  for (std::size_t k = 0; k < wanted.size(); ++k) {
    if (!gradients[k].defined()) gradients[k] = at::zeros_like(wanted[k]);
  }
  return {loss.item<double>(), std::move(gradients)};
}

double square_of(const at::Tensor& gradient) {
  return std::pow(at::norm(gradient, 2, at::toOpMathType(gradient.scalar_type())).item<double>(), 2);
}

struct Difference {
  double whole;  // the loss of the mini-batch
  double sum;    // of the micro-batches' losses
  double mean;   // the same, weighted
  double gap;    // between the gradients, relative: much the same losses tell too little
};

// Returns std::nullopt if there is none, or if the function draws random numbers, has a state, or is not finite.
std::optional<Difference> difference_of(const LossFunction& function, const std::vector<Parcel>& outputs,
                                        const std::vector<Parcel>& targets, const std::vector<at::Tensor>& losses,
                                        const std::vector<double>& weights) {
  const at::AutoGradMode grad_mode(true);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (total == 0) return std::nullopt;
  std::vector<std::int64_t> sizes;
  for (const auto& each : targets) sizes.push_back(each.tensors.front().size(0));
  const auto target = gather(targets, sizes, "").value;
  const auto [whole, gradients] =
      differentiate(function, gather(outputs, sizes, "").value, scatter(target, {batch_size(target)}).front(), 1);
  Difference found{whole, 0, 0, 0};
  double magnitude = std::abs(whole);
  std::vector<std::vector<at::Tensor>> parts(gradients.size());
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const double loss = losses[i].item<double>();
    const double share = weights[i] / total;
    auto [again, of_part] = differentiate(function, outputs[i].value(), targets[i], share);
    if (again != loss && !(std::isnan(again) && std::isnan(loss))) return std::nullopt;
    found.sum += loss;
    if (share != 0) found.mean += loss * share;
    magnitude = std::max(magnitude, std::abs(loss));
    for (std::size_t k = 0; k < parts.size(); ++k) parts[k].push_back(std::move(of_part[k]));
  }
  double off = 0;
  double square_of_all = 0;
  for (std::size_t k = 0; k < parts.size(); ++k) {
    off += square_of(gradients[k] - at::cat(parts[k]));
    square_of_all += square_of(gradients[k]);
  }
  found.gap = std::sqrt(off / square_of_all);
  const double epsilon = largest_epsilon(losses.front(), outputs.front());
  const double tolerance = 2 * std::pow(epsilon, 2.0 / 3) * magnitude + 8 * epsilon;
  const bool is_equal = std::abs(whole - found.mean) <= tolerance && off <= epsilon * square_of_all;  // not for NaN
  if (is_equal || !std::isfinite(whole) || !std::isfinite(square_of_all)) return std::nullopt;
  return found;
}

// Returns the shares of zeros, of negative numbers and of NaN in a sample of a tensor on the CPU: for one on a device
// the caller would wait.
std::array<double, 3> shares_of(const at::Tensor& tensor) {
  std::array<double, 3> found{};
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_complex()) return found;
  const auto all = tensor.numel();
  // An odd step, so that the sample is not one column of an image.
  const auto sample = tensor.flatten().slice(0, 0, all, (all / kSample) | 1).to(at::kFloat).contiguous();
  for (const float number : c10::ArrayRef(sample.const_data_ptr<float>(), sample.numel())) {
    found[0] += number == 0;
    found[1] += number < 0;
    found[2] += std::isnan(number);
  }
  for (auto& share : found) share /= static_cast<double>(std::max<std::int64_t>(sample.numel(), 1));
  return found;
}

// Returns ComparedLoss::uneven.
std::vector<bool> uneven_shares(const std::vector<Parcel>& targets) {
  std::vector<bool> uneven;
  for (std::size_t k = 0; k < targets.front().tensors.size(); ++k) {
    std::array<bool, 3> differ{};
    const auto first = shares_of(targets.front().tensors[k]);
    for (const auto& target : targets) {
      const auto shares = shares_of(target.tensors[k]);
      for (std::size_t i = 0; i < shares.size(); ++i) differ[i] = differ[i] || shares[i] != first[i];
    }
    uneven.insert(uneven.end(), differ.begin(), differ.end());
  }
  return uneven;
}

bool is_same(const ComparedLoss& one, const ComparedLoss& other) {
  return one.identity->equals(*other.identity) && *one.count == *other.count;
}

}  // namespace

Value clone_of(const Value& value) {
  auto tensors = value.tensors();
  for (auto& tensor : tensors) {
    if (tensor.defined()) tensor = tensor.clone();
  }
  return {value.form(), std::move(tensors)};
}

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

std::optional<LossComparison> LossComparison::begin(std::vector<ComparedLoss>& compared, const LossFunction& function,
                                                    const CountFunction& count, const std::vector<Parcel>& targets) {
  ComparedLoss now{function.identity, &count.target_type(), uneven_shares(targets)};
  const auto found = std::ranges::find_if(compared, [&](const auto& each) { return is_same(each, now); });
  if (found != compared.end()) {
    bool is_new = false;
    for (std::size_t i = 0; i < std::min(now.uneven.size(), found->uneven.size()); ++i) {
      is_new = is_new || (now.uneven[i] && !found->uneven[i]);
      now.uneven[i] = now.uneven[i] || found->uneven[i];
    }
    std::rotate(found, found + 1, compared.end());  // last used last
    if (!is_new) return std::nullopt;
  }
  return LossComparison(function, std::move(now), targets.size());
}

LossComparison::LossComparison(const LossFunction& function, ComparedLoss compared, std::size_t micro_batches)
    : function_(function),
      compared_(std::move(compared)),
      left_(micro_batches),
      outputs_(micro_batches),
      targets_(micro_batches) {}

bool LossComparison::add(int micro_batch, const Value& output, Parcel target) {
  outputs_[micro_batch].add_leaving(output);
  targets_[micro_batch] = std::move(target);
  return --left_ == 0;
}

void LossComparison::run(const std::vector<at::Tensor>& losses, const std::vector<double>& weights) {
  std::optional<Difference> found;
  std::function<void()> put_back;
  try {
    if (function_.hold_state) put_back = function_.hold_state();
    found = difference_of(function_, outputs_, targets_, losses, weights);
  } catch (...) {  // the loss function does not take a whole mini-batch
  }
  if (put_back) put_back();
  outputs_.clear();
  targets_.clear();
  if (!found) return;
  refuse_argument(
      "the loss of the whole mini-batch is ", found->whole, ", but the micro-batches give ", found->mean,
      " (their sum is ", found->sum, ") and gradients that are ", 100 * found->gap,
      " % off; if the loss ignores some targets, pass count, which returns what a micro-batch's mean is divided by; if "
      "it is a sum, pass reduction; if it does not decompose over samples, use forward() and backward(); turn check "
      "off to train so all the same");
}

void LossComparison::note(std::vector<ComparedLoss>& compared) && {
  std::erase_if(compared, [&](const auto& each) { return is_same(each, compared_); });
  if (compared.size() == kMostCompared) compared.erase(compared.begin());
  compared.push_back(std::move(compared_));
}

std::function<void()> hold_values(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> values;
  for (const auto& tensor : tensors) values.push_back(tensor.detach().clone());
  return [tensors, values = std::move(values),
          versions = std::vector<VersionWatch>(tensors.begin(), tensors.end())]() mutable {
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (!versions[i].changed()) continue;
      tensors[i].copy_(values[i]);
      versions[i].put_back();  // for the graphs that have saved the tensor
    }
  };
}

}  // namespace gpipe
