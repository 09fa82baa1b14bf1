#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe {

/// What a training step on one mini-batch computes.
struct StepResults {
  std::vector<torch::Tensor> outputs;
  std::vector<torch::Tensor> input_gradients;
  /// In the order of model->parameters(); undefined for unused parameters.
  std::vector<torch::Tensor> parameter_gradients;
};

/// The order of micro-batches in the backward.
enum class Order { kAscending, kDescending };

struct ReferenceStep {
  Value input;
  std::vector<std::int64_t> sizes;  ///< of the micro-batches
  Order order = Order::kDescending;
  /// Returns the gradients of the joined outputs. Empty if there is a loss.
  std::function<std::vector<torch::Tensor>(const std::vector<torch::Tensor>& outputs)> gradients_of = {};
  /// A loss that is a sum over samples, as the last layer; may be empty.
  LossFunction loss = {};
  Value target = {};
};

/// Runs the model on the calling thread, micro-batch by micro-batch, with the random scopes and boundary nodes of a
/// pipeline of this balance. Runs the backwards, and sums gradients, in the given order of micro-batches. Draws its seed
/// like a pipeline. A pipeline on the CPU must equal it bit by bit. With one stage it is a plain loop over the layers.
StepResults reference(const torch::nn::Sequential& model, const std::vector<std::int64_t>& balance,
                      const ReferenceStep& step);

}  // namespace gpipe
