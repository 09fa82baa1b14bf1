#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe {

/// The results that a pipeline must equal bit by bit on CPU.
struct ReferenceResult {
  std::vector<torch::Tensor> outputs;
  std::vector<torch::Tensor> input_gradients;
  /// In the order of model->parameters(); undefined for unused parameters.
  std::vector<torch::Tensor> parameter_gradients;
};

/// The order of micro-batches in the backward.
enum class Order { kAscending, kDescending };

/// Runs the model on the calling thread, micro-batch by micro-batch, with the random scopes and boundary nodes of a
/// pipeline of this balance. Runs the backwards, and sums gradients, in the order of micro-batches given.
/// `output_gradients` belong to the gathered outputs. Draws its seed like a pipeline.
ReferenceResult reference(const torch::nn::Sequential& model, const std::vector<std::int64_t>& balance,
                          const Value& input, const std::vector<std::int64_t>& sizes,
                          const std::vector<torch::Tensor>& output_gradients, Order order = Order::kDescending);

}  // namespace gpipe
