#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "gpipe/loss.h"
#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/value.h"

namespace gpipe {

/// check_loss() in a step(), for a loss that is taken to be a mean over samples; see StepOptions::check. Used by the last stage's
/// worker.
class LossComparison {
 public:
  LossComparison(LossFunction function, int micro_batches);

  /// Takes the output, the target and the loss of a micro-batch. The last one to come compares. Errors: std::invalid_argument
  /// if the losses differ.
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

}  // namespace gpipe
