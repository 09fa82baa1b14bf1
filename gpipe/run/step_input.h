#pragma once

#include <ATen/core/Tensor.h>

#include "gpipe/loss.h"
#include "gpipe/run/pipeline.h"

namespace gpipe {

/// Copies tensors of the caller to the device of a stage: the inputs to the first stage, the targets to the last.
class CallerInputs {
 public:
  /// Takes one parcel per micro-batch. Reads their tensors after the caller's work on its current streams.
  CallerInputs(Pipeline& pipeline, std::vector<Parcel> parcels, c10::Device device);

  /// The caller's, before the first receive().
  const std::vector<Parcel>& parcels() const { return parcels_; }
  /// Returns a micro-batch's parcel, once. Call on the stage's worker.
  Parcel receive(int micro_batch);

  /// Waits for the copies from pinned memory, which the caller may overwrite then. Call when the workers rest.
  void await_copies() const;

 private:
  const c10::Device device_;
  std::vector<Parcel> parcels_;
  // Per tensor of a parcel.
  std::vector<StreamEvents> ready_;
  std::vector<Link> links_;
  std::vector<StreamEvents> copied_;  // behind its last copy from pinned memory
};

/// Returns the common size of dimension 0. Errors: std::invalid_argument for no tensors, an undefined or 0-dimensional
/// tensor, or unequal sizes; its message calls the value `what`.
std::int64_t batch_size(const Value& value, const std::string& what = "input");

/// Cuts each tensor along dimension 0 into detached views, a parcel per micro-batch, which want gradients as it does.
std::vector<Parcel> scatter(const Value& input, const std::vector<std::int64_t>& sizes);

/// The joined micro-batches.
struct Gathered {
  Value value;
  std::vector<bool> wants_gradient;  ///< per tensor: whether any of its parts wants a gradient
};

/// Joins the parts along dimension 0. Copies of a single part only tensors that share memory with another output or
/// input. Errors: std::runtime_error if the parts differ in form, number of tensors or other dimensions, or if dimension
/// 0 of one does not have the micro-batch's size; its message names the layer that returned them.
Gathered gather(const std::vector<Parcel>& parts, const std::vector<std::int64_t>& sizes, const std::string& layer);

/// The outputs of a mini-batch's model. The last stage's worker adds them, then the caller takes them.
class Outputs {
 public:
  /// `last`: the last stage, which must outlive this.
  Outputs(std::vector<std::int64_t> sizes, const Stage& last)
      : sizes_(std::move(sizes)), last_(last), parts_(sizes_.size()) {}

  void add(int micro_batch, Parcel part);
  /// Notes where a result is: a layer or a loss may move it to another device than the stage's.
  void note_device(const at::Tensor& result);
  const std::vector<c10::Device>& other_devices() const { return other_devices_; }
  /// Joins the micro-batches, once.
  Gathered gather();

 private:
  const std::vector<std::int64_t> sizes_;
  const Stage& last_;
  std::vector<Parcel> parts_;
  std::vector<c10::Device> other_devices_;
};

/// Cuts a gathered output's gradient into parts of these sizes along dimension 0, undefined ones if it is undefined.
std::vector<at::Tensor> scatter_gradient(const at::Tensor& gradient, const std::vector<std::int64_t>& sizes);

/// Joins the micro-batches' gradients of one input. Undefined parts become zeros; the result is undefined if all are.
at::Tensor gather_gradient(std::vector<at::Tensor> parts, const std::vector<std::int64_t>& sizes);

/// Fills in the reduction, the count, and whether to check the loss. Errors: std::invalid_argument for an empty
/// function, a target that requires grad or has another number of samples, a scale that is not finite and positive, or
/// a count with Reduction::kSum.
StepOptions complete(StepOptions options, const LossFunction& loss, const Value& target, std::int64_t samples);

/// Returns what the micro-batches' losses are the means of; nothing if these are the samples, or for sums. Errors:
/// std::invalid_argument for a count that is not one number.
std::vector<at::Tensor> counts_of(const StepOptions& options, const std::vector<Parcel>& targets);
/// Returns the micro-batches' weights, before normalize_weights(). Waits for the counts. Errors: std::invalid_argument
/// for one that is negative or not finite.
std::vector<double> loss_weights(const StepOptions& options, const std::vector<std::int64_t>& sizes,
                                 const std::vector<at::Tensor>& counts);
/// Divides the weights of a mean by `total`, the sum of the mini-batch's. Errors: std::invalid_argument if that is 0.
void normalize_weights(std::vector<double>& weights, double total, Reduction reduction);

}  // namespace gpipe
