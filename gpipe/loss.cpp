#include "gpipe/loss.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>

#include "gpipe/micro_batch.h"

namespace gpipe {
namespace {

Value value_of(const Parcel& parcel) { return {parcel.form, parcel.tensors}; }

double count_of(const StepOptions& options, const Parcel& target, std::size_t micro_batch) {
  const double count = options.count()(value_of(target));
  if (std::isfinite(count) && count >= 0) return count;
  throw std::invalid_argument("[gpipe] count returned " + std::to_string(count) + " for micro-batch " +
                              std::to_string(micro_batch) + "; return a finite number that is not negative");
}

}  // namespace

std::vector<double> loss_weights(const StepOptions& options, const std::vector<std::int64_t>& sizes,
                                 const std::vector<Parcel>& targets) {
  if (options.reduction() == Reduction::kSum) return std::vector<double>(sizes.size(), 1);
  std::vector<double> weights(sizes.begin(), sizes.end());
  if (options.count()) {
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = count_of(options, targets[i], i);
  }
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (total == 0) {
    throw std::invalid_argument(
        options.count()
            ? "[gpipe] count returned 0 for every micro-batch, so the loss has no mean; skip this mini-batch"
            : "[gpipe] the mini-batch has no samples, so the loss has no mean; skip it");
  }
  for (auto& weight : weights) weight /= total;
  return weights;
}

at::Tensor call_loss(const LossFunction& function, const Value& output, const Value& target) {
  auto loss = function(output, target);
  if (!loss.defined()) throw std::invalid_argument("[gpipe] the loss function returned an undefined tensor");
  if (loss.dim() != 0 || !loss.is_floating_point()) {
    std::ostringstream message;
    message << "[gpipe] the loss function returned a tensor of shape " << loss.sizes() << " and type " << loss.dtype()
            << "; return a floating-point scalar";
    throw std::invalid_argument(message.str());
  }
  const auto& tensors = output.tensors();
  const bool differentiable =
      std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.defined() && t.requires_grad(); });
  if (at::GradMode::is_enabled() && differentiable && !loss.requires_grad()) {
    throw std::invalid_argument(
        "[gpipe] the loss does not depend on the model's output in a differentiable way; compute it from the output "
        "without detach() or no_grad");
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

LossCheck check_loss(const LossFunction& loss, const Value& output, const Value& target, std::int64_t chunks,
                     const StepOptions& options) {
  at::NoGradGuard no_grad;
  const auto sizes = micro_batch_sizes(batch_size(output), chunks, /*split_size=*/0);
  const auto outputs = scatter(output, sizes);
  const auto targets = scatter(target, sizes);
  std::vector<at::Tensor> losses;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    losses.push_back(call_loss(loss, value_of(outputs[i]), value_of(targets[i])));
  }
  const auto whole = call_loss(loss, output, target);
  return {whole.item<double>(), join_losses(losses, loss_weights(options, sizes, targets)).item<double>()};
}

}  // namespace gpipe
