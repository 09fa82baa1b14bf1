#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/enum.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <variant>

#include "gpipe/schedule/action.h"
#include "gpipe/tensors/value.h"

namespace gpipe {

/// How the losses of the micro-batches are joined to the loss of the mini-batch.
enum class Reduction {
  kMean,  ///< weighted by their share of samples, or of a count; for losses that are means
  kSum,   ///< for losses that are sums
};

/// Returns the number of elements that a micro-batch's loss is the mean of, such as the targets that are not ignored.
/// Called on the caller's thread.
using CountFunction = std::function<double(const Value& target)>;

/// Computes the loss of one micro-batch, a floating-point scalar. Runs on the last stage's worker, in its stream, once
/// per micro-batch. Draws random numbers as a layer after the last does. Tensors that it uses and that require grad get
/// gradients, but not with replicas. REQUIRES: does not write to the target.
struct LossFunction : std::function<at::Tensor(const Value& output, const Value& target)> {
  using std::function<at::Tensor(const Value&, const Value&)>::function;

  /// How the loss of a micro-batch reduces, if that is known, and what its mean is the mean of; empty: the samples.
  std::optional<Reduction> reduction = {};
  CountFunction count = {};
  /// Tells losses apart for StepOptions::check. Empty: losses of one type count as one.
  std::optional<std::size_t> kind = {};
};

/// Returns the count of torch's cross entropy or NLL loss: its targets that are not ignored, or their weights' sum.
CountFunction count_of_classes(at::Tensor weight, std::int64_t ignore_index);

/// Makes a LossFunction from a function of two tensors. Reads the options of torch's loss modules.
template <typename F>
LossFunction tensor_loss(F function) {
  std::optional<Reduction> reduction;
  CountFunction count;
  if constexpr (requires { function->options.reduction(); }) {
    const bool is_sum = std::holds_alternative<torch::enumtype::kSum>(function->options.reduction());
    reduction = is_sum ? Reduction::kSum : Reduction::kMean;
    if constexpr (requires { function->options.ignore_index(); }) {
      if (!is_sum) count = count_of_classes(function->weight, function->options.ignore_index());
    }
  }
  LossFunction loss = [function = std::move(function)](const Value& output, const Value& target) mutable -> at::Tensor {
    return function(output.tensor(), target.tensor());
  };
  loss.reduction = reduction;
  loss.count = std::move(count);
  return loss;
}

struct StepOptions {
  /// Default: as the loss reduces, if it is a module of torch in tensor_loss(), else kMean.
  TORCH_ARG(std::optional<Reduction>, reduction);
  /// What kMean weights a micro-batch by. Default: the count of a module of torch in tensor_loss(), else the samples.
  TORCH_ARG(CountFunction, count);
  /// Whether a pipeline's first step() with a loss of this type (LossFunction::kind) compares the joined loss and its
  /// gradients with the loss and gradients of the whole mini-batch, for which it keeps all outputs. Compares once more
  /// when the shares of negative integers or of false in the micro-batches' targets on the CPU first differ, because
  /// losses ignore such targets. Throws std::invalid_argument if the losses differ. Does nothing if the reduction is
  /// known or given as kSum, or for a loss that fails on the whole mini-batch or draws random numbers.
  TORCH_ARG(bool, check) = true;
  /// Multiplies all gradients, for loss scaling. The returned loss is not scaled.
  TORCH_ARG(double, scale) = 1;
  /// Also return the detached output of the model.
  TORCH_ARG(bool, return_output) = false;
  /// Instead of the pipeline's chunks or split_size, for this step. 0: those of the pipeline.
  TORCH_ARG(std::int64_t, chunks) = 0;
  /// Instead of the pipeline's checkpoint mode, for this step.
  TORCH_ARG(std::optional<Checkpoint>, checkpoint);
};

struct StepResult {
  at::Tensor loss;  ///< detached
  Value output;     ///< empty unless StepOptions::return_output
};

/// See check_loss().
struct LossCheck {
  double whole = 0;
  double from_micro_batches = 0;
};

/// Returns the loss of the whole `output`, and the one that step() would join from `chunks` micro-batches. They differ
/// for a loss that does not decompose over samples, such as Dice over the batch or a contrastive loss, for which step()
/// is of no use. Calls the loss without grad mode, on copies of the output. Errors: as for step().
LossCheck check_loss(const LossFunction& loss, const Value& output, const Value& target, std::int64_t chunks,
                     const StepOptions& options = {});

}  // namespace gpipe
