#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <torch/enum.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "gpipe/api.h"
#include "gpipe/value.h"

namespace gpipe {

/// How the losses of the micro-batches are joined to the loss of the mini-batch.
enum class Reduction {
  kMean,  ///< weighted by their share of samples, or of a count; for losses that are means
  kSum,   ///< for losses that are sums
};

/// A number, or a tensor of one element. The step does not wait for a tensor on a device, except with replicas.
struct GPIPE_API Count : at::Tensor {
  Count(double number);
  Count(at::Tensor tensor) : at::Tensor(std::move(tensor)) {}
};

/// Returns the number of elements that a micro-batch's loss is the mean of, such as the targets that are not ignored.
/// Called on the caller's thread.
using CountFunction = std::function<Count(const Value& target)>;

/// What StepOptions::check has compared of a loss.
struct LossRecord;
GPIPE_API std::shared_ptr<LossRecord> make_loss_record();

/// Computes the loss of one micro-batch, a floating-point scalar. Runs on the last stage's worker, in its stream, once
/// per micro-batch. Draws random numbers as a layer after the last does. Tensors that it uses and that require grad get
/// gradients, but not with replicas. REQUIRES: does not write to the target.
struct LossFunction : std::function<at::Tensor(const Value& output, const Value& target)> {
  using Function = std::function<at::Tensor(const Value&, const Value&)>;
  LossFunction() = default;
  template <typename F>
  requires(!std::derived_from<std::decay_t<F>, LossFunction> && std::constructible_from<Function, F>)
      LossFunction(F&& function)
      : Function(std::forward<F>(function)), record(make_loss_record()) {}

  /// Copies share it, so a step that has compared a loss does not compare a copy again.
  std::shared_ptr<LossRecord> record;
  /// How the loss of a micro-batch reduces, if that is known, and what its mean is the mean of; empty: the samples.
  std::optional<Reduction> reduction = {};
  CountFunction count = {};
  /// Notes the state that copies of this share, and returns a function that puts it back. Empty: there is none.
  std::function<std::function<void()>()> hold_state = {};
};

/// Returns the count of torch's cross entropy or NLL loss: its targets that are not ignored, or their weights' sum.
GPIPE_API CountFunction count_of_classes(at::Tensor weight, std::int64_t ignore_index);

/// Notes the values of tensors. Returns a function that puts them back.
GPIPE_API std::function<void()> hold_values(const std::vector<at::Tensor>& tensors);

/// Makes a LossFunction from a function of two tensors. Reads the options of torch's loss modules.
template <typename F>
LossFunction tensor_loss(F function) {
  LossFunction loss([function](const Value& output, const Value& target) mutable -> at::Tensor {
    return function(output.tensor(), target.tensor());
  });
  if constexpr (requires { function->buffers(); }) {
    loss.hold_state = [function] { return hold_values(function->buffers()); };
  }
  if constexpr (requires { function->options.reduction(); }) {
    // Another class may compute anything.
    if (!c10::demangle(typeid(*function).name()).starts_with("torch::nn::")) return loss;
    const bool is_sum = std::holds_alternative<torch::enumtype::kSum>(function->options.reduction());
    loss.reduction = is_sum ? Reduction::kSum : Reduction::kMean;
    if constexpr (requires { function->options.ignore_index(); }) {
      if (!is_sum) loss.count = count_of_classes(function->weight, function->options.ignore_index());
    }
  }
  return loss;
}

}  // namespace gpipe
