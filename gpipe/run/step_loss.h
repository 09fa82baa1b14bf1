#pragma once

#include <ATen/core/Tensor.h>

#include "gpipe/loss.h"
#include "gpipe/run/backward_gradients.h"
#include "gpipe/run/micro_batch.h"

namespace gpipe {

/// Fills in what the options leave open: the reduction, the count, and whether to check the loss.
StepOptions complete(StepOptions options, const LossFunction& loss);

/// Errors: std::invalid_argument for an empty function, a target that requires grad or has another number of samples, a
/// scale that is not finite and positive, or a count with Reduction::kSum.
void check_loss_arguments(const LossFunction& loss, const Value& target, std::int64_t samples,
                          const StepOptions& options);

/// Returns the micro-batches' weights, before normalize(). Errors: std::invalid_argument for a count < 0 or not finite.
std::vector<double> loss_weights(const StepOptions& options, const std::vector<std::int64_t>& sizes,
                                 const std::vector<Parcel>& targets);

/// Divides the weights of a mean by `total`, the sum of the mini-batch's. Errors: std::invalid_argument if that is 0.
void normalize(std::vector<double>& weights, double total, Reduction reduction);

/// Calls a loss function on one micro-batch. Errors: std::invalid_argument unless it returns a floating-point scalar, with
/// a graph if the output has one; std::runtime_error if it changes the target in place.
at::Tensor call_loss(const LossFunction& function, const Value& output, const Parcel& target);

/// Returns the loss of the mini-batch: the sum of the losses times their weights, in order.
at::Tensor join_losses(const std::vector<at::Tensor>& losses, const std::vector<double>& weights);

/// check_loss() in a step(), for a loss taken to be a mean of samples; see StepOptions::check. On the last worker.
class LossComparison {
 public:
  LossComparison(LossFunction function, int micro_batches);

  /// Takes a micro-batch's output, target and loss. The last to come compares. Errors: std::invalid_argument.
  void add(std::size_t micro_batch, const Value& output, Parcel target, const at::Tensor& loss);

 private:
  void compare() const;
  bool can_join() const;
  double epsilon() const;
  bool repeats() const;

  LossFunction function_;
  int left_;  // micro-batches that have not come
  // Per micro-batch.
  std::vector<Parcel> outputs_;
  std::vector<Parcel> targets_;
  std::vector<at::Tensor> losses_;
};

/// The outputs of a mini-batch's model, per micro-batch. The last stage's worker adds them, then the caller takes them.
class Outputs {
 public:
  /// `device`: the last stage's.
  Outputs(int micro_batches, c10::Device device) : device_(device), parts_(micro_batches) {}

  void add(int micro_batch, Parcel part);
  /// Notes where a result is: a layer or a loss may move it to another device than the stage's.
  void note_device(const at::Tensor& result);
  const std::vector<c10::Device>& other_devices() const { return other_devices_; }
  /// Joins the micro-batches, once.
  Gathered gather();

 private:
  const c10::Device device_;
  std::vector<Parcel> parts_;
  std::vector<c10::Device> other_devices_;
};

/// The loss of step(): a layer after the model's last one.
///
/// Thread safety: used by the last stage's worker, and by the caller before and after.
class StepLoss {
 public:
  /// `options`: see complete(). `targets`: per micro-batch. `pipeline` must outlive this. Errors: as loss_weights().
  StepLoss(Pipeline& pipeline, LossFunction function, StepOptions options, std::vector<Parcel> targets,
           const std::vector<std::int64_t>& sizes);

  /// Divides the weights by their sum over all replicas. Errors: as normalize().
  void normalize(double total) { gpipe::normalize(weights_, total, *options_.reduction()); }
  /// The sum of the weights of this replica's micro-batches.
  double weight() const;
  bool keeps_outputs() const { return options_.return_output(); }
  /// Whether to compare the loss of the whole mini-batch, the first time that the pipeline has a loss of this kind.
  void begin_comparison();
  void end_comparison();

  /// Returns the last layer of a micro-batch's cell, which computes its loss, and adds to `outputs` if they are kept.
  /// REQUIRES: this and `outputs` outlive the layer's calls.
  std::unique_ptr<Layer> layer(int micro_batch, Outputs& outputs);
  /// The gradient of the last layer's output. Undefined if the loss has no weight, which stops the backward.
  at::Tensor gradient(int micro_batch) const;
  /// Joins the losses of the micro-batches, once.
  at::Tensor join();

 private:
  class LossLayer;
  std::size_t kind() const { return function_.kind.value_or(function_.target_type().hash_code()); }

  Pipeline& pipeline_;
  const LossFunction function_;
  const StepOptions options_;
  std::vector<double> weights_;  // per micro-batch; a loss of weight 0 gets no backward
  CallerInputs targets_;
  std::vector<at::Tensor> losses_;  // per micro-batch
  std::optional<LossComparison> comparison_;
};

/// What a forward or a step returns.
struct Results {
  at::Tensor loss;                      ///< of a step(), detached
  Gathered outputs;                     ///< of a forward, or if the loss keeps them
  BackwardGradients::Result gradients;  ///< of a step()
};
/// Joins the results of the micro-batches, once. All ranks get those of the ranks with the last stage. `loss` may be null.
Results share_results(Pipeline& pipeline, Outputs& outputs, StepLoss* loss);

}  // namespace gpipe
