#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "gpipe/autograd/layer.h"
#include "gpipe/loss.h"
#include "gpipe/run/inlet.h"
#include "gpipe/run/loss_check.h"
#include "gpipe/run/micro_batch.h"
#include "gpipe/run/pipeline.h"

namespace gpipe {

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
  /// `pipeline` and `outputs` must outlive this.
  StepLoss(Pipeline& pipeline, LossOfMiniBatch loss, Outputs& outputs);

  /// Divides the weights by their sum over all replicas. Errors: as normalize().
  void normalize(double total) { gpipe::normalize(loss_.weights, total, loss_.reduction); }
  /// The sum of the weights of this replica's micro-batches.
  double weight() const;
  bool keeps_outputs() const { return loss_.keep_outputs; }
  /// Whether to compare the loss of the whole mini-batch, the first time that the pipeline has a loss of this kind.
  void begin_comparison();
  void end_comparison();

  /// Returns the last layer of a micro-batch's cell, which computes its loss. REQUIRES: this outlives the layer's calls.
  std::unique_ptr<Layer> layer(int micro_batch);
  /// The gradient of the last layer's output. Undefined if the loss has no weight, which stops the backward.
  at::Tensor gradient(int micro_batch) const;
  /// Joins the losses of the micro-batches, once.
  at::Tensor join();

 private:
  class LossLayer;
  std::size_t kind() const { return loss_.function.kind.value_or(loss_.function.target_type().hash_code()); }

  Pipeline& pipeline_;
  LossOfMiniBatch loss_;
  Outputs& outputs_;
  Inlet targets_;
  std::vector<at::Tensor> losses_;  // per micro-batch
  std::optional<LossComparison> comparison_;
};

}  // namespace gpipe
