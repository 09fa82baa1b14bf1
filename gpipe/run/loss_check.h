#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <typeinfo>
#include <vector>

#include "gpipe/loss_function.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {

/// Calls a loss function on one micro-batch. Errors: as StepLoss::compute().
at::Tensor call_loss(const LossFunction& function, const Value& output, const Parcel& target);

/// Copies the tensors, because a loss function may change the output in place.
Value clone_of(const Value& value);

/// A loss that a pipeline has compared, and the type of the count that weighted it.
struct ComparedLoss {
  std::shared_ptr<const LossIdentity> identity;
  const std::type_info* count;
  /// Per tensor of the target: whether the micro-batches' shares of zeros, of negative numbers and of NaN have differed.
  std::vector<bool> uneven;
};

/// Compares the loss of a mini-batch with those of its micro-batches, for StepOptions::check.
///
/// Thread safety: as StepLoss.
class LossComparison {
 public:
  /// `targets`: per micro-batch, before the forwards. Returns std::nullopt if a comparison would tell nothing new.
  static std::optional<LossComparison> begin(std::vector<ComparedLoss>& compared, const LossFunction& function,
                                             const CountFunction& count, const std::vector<Parcel>& targets);

  /// Returns whether all micro-batches have come.
  bool add(int micro_batch, const Value& output, Parcel target);
  /// Compares, once. `losses` and `weights`: per micro-batch. Puts back the state of the loss. Errors:
  /// std::invalid_argument if the losses or their gradients differ.
  void run(const std::vector<at::Tensor>& losses, const std::vector<double>& weights);
  /// Adds this to what has been compared.
  void note(std::vector<ComparedLoss>& compared) &&;

 private:
  LossComparison(const LossFunction& function, ComparedLoss compared, std::size_t micro_batches);

  LossFunction function_;  // a copy, which may have a state
  ComparedLoss compared_;  // after the comparison
  std::size_t left_;       // micro-batches that have not come
  std::vector<Parcel> outputs_;
  std::vector<Parcel> targets_;
};

}  // namespace gpipe
