#include "gpipe/run/loss_check.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <torch/autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "gpipe/base/checks.h"
#include "gpipe/run/step_input.h"
#include "gpipe/run/step_loss.h"

namespace gpipe {
namespace {

constexpr std::int64_t kSample = 8192;

// Copies the tensors, because a loss function may change the output in place.
Value clone_of(const Value& value) {
  auto tensors = value.tensors();
  for (auto& tensor : tensors) {
    if (tensor.defined()) tensor = tensor.clone();
  }
  return {value.form(), std::move(tensors)};
}

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

// Returns numbers of a tensor on the CPU: for one on a device the caller would wait.
at::Tensor sample_of(const at::Tensor& tensor, std::int64_t most) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_complex())
    return at::empty(0);
  // An odd step, so that the sample is not one column of an image.
  return tensor.flatten().slice(0, 0, tensor.numel(), (tensor.numel() / most) | 1).to(at::kFloat).contiguous();
}

TargetMarks marks_of(const std::vector<Parcel>& targets, std::size_t k) {
  TargetMarks marks;
  marks.is_integer = at::isIntegralType(targets.front().tensors[k].scalar_type(), /*includeBool=*/true);
  std::array<double, 4> first{};
  std::vector<float> integers;
  for (const auto& target : targets) {
    const auto sample = sample_of(target.tensors[k], kSample);
    std::array<double, 4> shares{};
    for (const float number : c10::ArrayRef(sample.const_data_ptr<float>(), sample.numel())) {
      shares[0] += number == 0;
      shares[1] += number < 0;
      shares[2] += std::isnan(number);
      shares[3] += std::isnan(number) ? 0 : number;
      marks.low = std::min(marks.low, number);  // not NaN
      marks.high = std::max(marks.high, number);
    }
    for (auto& share : shares) share /= static_cast<double>(std::max<std::int64_t>(sample.numel(), 1));
    if (&target == &targets.front()) first = shares;
    for (std::size_t i = 0; i < shares.size(); ++i) marks.uneven[i] = marks.uneven[i] || shares[i] != first[i];
    if (!marks.is_integer) continue;
    const auto few = sample_of(target.tensors[k], std::max<std::int64_t>(1, kSample / std::ssize(targets)));
    integers.insert(integers.end(), few.const_data_ptr<float>(), few.const_data_ptr<float>() + few.numel());
  }
  std::ranges::sort(integers);
  std::size_t most = std::max<std::size_t>(2, integers.size() / 8);
  for (auto at = integers.begin(); at != integers.end();) {
    const auto end = std::upper_bound(at, integers.end(), *at);
    if (static_cast<std::size_t>(end - at) > most) {
      most = end - at;
      marks.frequent = {*at};
    }
    at = end;
  }
  return marks;
}

}  // namespace

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
  normalize_weights(weights, std::accumulate(weights.begin(), weights.end(), 0.0), *completed.reduction());
  return {whole.item<double>(), join_losses(losses, weights).item<double>()};
}

bool TargetMarks::add(const TargetMarks& later) {
  bool is_new = false;
  for (std::size_t i = 0; i < uneven.size(); ++i) {
    is_new = is_new || (later.uneven[i] && !uneven[i]);
    uneven[i] = uneven[i] || later.uneven[i];
  }
  // The range of other numbers grows as long as they are drawn.
  const float slack = is_integer ? 0 : high - low;
  is_new = is_new || later.low < low - slack || later.high > high + slack;
  low = std::min(low, later.low);
  high = std::max(high, later.high);
  const auto known = frequent.size();
  frequent.insert(later.frequent.begin(), later.frequent.end());
  return is_new || frequent.size() > known;
}

std::shared_ptr<LossRecord> make_loss_record() { return std::make_shared<LossRecord>(); }

std::optional<LossComparison> LossComparison::begin(const LossFunction& function, const CountFunction& count,
                                                    const std::vector<Parcel>& targets) {
  std::vector<TargetMarks> marks;
  for (std::size_t k = 0; k < targets.front().tensors.size(); ++k) marks.push_back(marks_of(targets, k));
  auto& record = *function.record;
  const std::lock_guard lock(record.mutex);
  if (record.count != nullptr && *record.count == count.target_type() && record.marks.size() == marks.size()) {
    bool is_new = false;
    for (std::size_t k = 0; k < marks.size(); ++k) {
      auto all = record.marks[k];
      is_new = all.add(marks[k]) || is_new;
      marks[k] = std::move(all);
    }
    if (!is_new) return std::nullopt;
  }
  return LossComparison(function, count.target_type(), std::move(marks), targets.size());
}

LossComparison::LossComparison(const LossFunction& function, const std::type_info& count,
                               std::vector<TargetMarks> marks, std::size_t micro_batches)
    : function_(function),
      count_(&count),
      marks_(std::move(marks)),
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
      " % off; if the loss ignores some targets, give count, which returns what a micro-batch's mean is divided by; if "
      "it is a sum, give reduction; if it does not decompose over samples, use forward() and backward(); turn check "
      "off to train so all the same (in Python, gpipe.Loss(loss, count=..., reduction=..., check=...))");
}

void LossComparison::note() {
  auto& record = *function_.record;
  const std::lock_guard lock(record.mutex);
  record.count = count_;
  record.marks = std::move(marks_);
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
