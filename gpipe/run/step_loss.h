#pragma once

#include <ATen/core/Tensor.h>

#include "gpipe/loss.h"
#include "gpipe/run/loss_check.h"
#include "gpipe/run/step_input.h"

namespace gpipe {

/// Calls a loss function on one micro-batch. Errors: as StepLoss::compute().
at::Tensor call_loss(const LossFunction& function, const Value& output, const Parcel& target);

/// Returns the loss of the mini-batch: the sum of the losses times their weights, in order.
at::Tensor join_losses(const std::vector<at::Tensor>& losses, const std::vector<double>& weights);

/// The loss of step(): a layer after the model's last one. Compares the loss of the whole mini-batch if the options say
/// so (StepOptions::check).
///
/// Thread safety: used by the last stage's worker, and by the caller before and after.
class StepLoss {
 public:
  /// `options`: see complete(). `targets`: per micro-batch. `pipeline` must outlive this. Errors: std::invalid_argument
  /// for a count that is not one number, or that is on the CPU and negative or not finite.
  StepLoss(Pipeline& pipeline, LossFunction function, StepOptions options, std::vector<Parcel> targets,
           const std::vector<std::int64_t>& sizes);

  /// The sum of the weights of this replica's micro-batches; 1 if only a device knows it.
  double weight() const;
  /// Divides the weights of a mean by `total`, their sum over all replicas. Call it before the forwards. Errors:
  /// std::invalid_argument if that is 0.
  void normalize(double total);
  /// Begins a LossComparison if one is due. Call it before the forwards, in their call.
  void begin_comparison();
  bool keeps_outputs() const { return options_.return_output(); }

  /// Returns the loss of a micro-batch, the last layer of its cell. Adds to `outputs` if they are kept. Errors:
  /// std::invalid_argument unless the function returns a floating-point scalar, with a graph if the output has one, and
  /// if the comparison fails; std::runtime_error if the function changes the target in place.
  at::Tensor compute(int micro_batch, const Value& output, Outputs& outputs);
  /// The gradient of compute(). Undefined if the loss has no weight, which stops the backward.
  at::Tensor gradient(int micro_batch) const;
  /// Joins the losses of the micro-batches, once.
  at::Tensor join();

 private:
  std::vector<double> weights() const;

  Pipeline& pipeline_;
  const LossFunction function_;
  const StepOptions options_;
  std::vector<double> weights_;  // per micro-batch; a loss of weight 0 gets no backward
  // Each micro-batch's share of the sum of counts. Used instead of weights_ when the counts are on a device and no other
  // replica needs them.
  std::optional<CallerInputs> shares_on_device_;
  std::vector<at::Tensor> shares_;  // on the losses' devices
  CallerInputs targets_;
  std::vector<at::Tensor> losses_;  // per micro-batch
  std::optional<LossComparison> comparison_;
};

}  // namespace gpipe
