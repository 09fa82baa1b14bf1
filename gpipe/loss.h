#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "gpipe/autograd/parcel.h"
#include "gpipe/autograd/value.h"
#include "gpipe/schedule/generators.h"

namespace gpipe {

/// Computes the loss of one micro-batch, a floating-point scalar. Runs on the last stage's worker, in its stream, once per
/// micro-batch: in the recompute if there is one, else in the forward. Draws random numbers as a layer after the last does.
/// REQUIRES: it does not change the target in place, and has no parameters; a loss with parameters must be a layer of the
/// model.
using LossFunction = std::function<at::Tensor(const Value& output, const Value& target)>;

/// Makes a LossFunction from a function of two tensors, for models and targets of one tensor.
template <typename F>
LossFunction tensor_loss(F function) {
  return [function = std::move(function)](const Value& output, const Value& target) -> at::Tensor {
    return function(output.tensor(), target.tensor());
  };
}

/// How the losses of the micro-batches are joined to the loss of the mini-batch.
enum class Reduction {
  kMean,  ///< weighted by their share of samples, or of StepOptions::count; for losses that are means
  kSum,   ///< for losses that are sums
};

struct StepOptions {
  TORCH_ARG(Reduction, reduction) = Reduction::kMean;
  /// With kMean: returns the number of elements that a micro-batch's loss is the mean of, such as the targets that are not
  /// ignored. Called on the caller's thread with each micro-batch's target. Empty: the number of samples.
  TORCH_ARG(std::function<double(const Value& target)>, count);
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

/// The loss of one mini-batch, in parts.
struct LossOfMiniBatch {
  LossFunction function;
  std::vector<Parcel> targets;  ///< per micro-batch
  std::vector<double> weights;  ///< per micro-batch, as loss_weights(); a loss of weight 0 gets no backward
  Reduction reduction = Reduction::kMean;
  double scale = 1;
  bool keep_outputs = false;
};

/// Errors: std::invalid_argument for an empty function, a target that requires grad or has another number of samples, a
/// scale that is not finite and positive, or a count with Reduction::kSum.
void check_loss_arguments(const LossFunction& loss, const Value& target, std::int64_t samples,
                          const StepOptions& options);

/// Returns the weights of the micro-batches, before normalize(). Errors: std::invalid_argument for a count that is negative
/// or not finite.
std::vector<double> loss_weights(const StepOptions& options, const std::vector<std::int64_t>& sizes,
                                 const std::vector<Parcel>& targets);

/// Divides the weights of a mean by `total`, the sum of those of the whole mini-batch. Errors: std::invalid_argument if that
/// is 0.
void normalize(std::vector<double>& weights, double total, Reduction reduction);

/// Calls a loss function on one micro-batch. Errors: std::invalid_argument unless it returns a floating-point scalar, with
/// a graph if the output has one; std::runtime_error if it changes the target in place.
at::Tensor call_loss(const LossFunction& function, const Value& output, const Parcel& target);

/// Returns the loss of the mini-batch: the sum of the losses times their weights, in order.
at::Tensor join_losses(const std::vector<at::Tensor>& losses, const std::vector<double>& weights);

/// The loss of a whole mini-batch, and the one that step() would compute from its micro-batches.
struct LossCheck {
  double whole = 0;
  double from_micro_batches = 0;
};

/// Compares the loss of the whole `output` with the joined losses of `chunks` micro-batches. They differ for a loss that
/// does not decompose over samples, such as Dice over the batch or a contrastive loss. Do not use step() with such a
/// loss. Calls it without grad mode, on copies of the output. Errors: as for step().
LossCheck check_loss(const LossFunction& loss, const Value& output, const Value& target, std::int64_t chunks,
                     const StepOptions& options = {});

}  // namespace gpipe
