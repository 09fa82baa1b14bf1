#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe {

/// What a pipeline must equal, bit by bit, on CPU.
struct ReferenceResult {
  std::vector<torch::Tensor> outputs;
  std::vector<torch::Tensor> input_gradients;
  /// In the order of model->parameters(); undefined where a parameter was not used.
  std::vector<torch::Tensor> parameter_gradients;
};

/// The order of micro-batches in the backward.
enum class Order { kAscending, kDescending };

/// Runs the layers whole on the calling thread, micro-batch by micro-batch, under the random scopes and with the
/// boundary nodes that a pipeline of this balance has; back-propagates in the order of micro-batches and sums in that
/// order. `output_gradients` are those of the gathered outputs. Draws its seed as a pipeline does.
ReferenceResult reference(const torch::nn::Sequential& model, const std::vector<std::int64_t>& balance,
                          const Value& input, const std::vector<std::int64_t>& sizes,
                          const std::vector<torch::Tensor>& output_gradients, Order order = Order::kDescending);

}  // namespace gpipe
