#pragma once

#include <torch/csrc/autograd/function.h>

#include <array>
#include <cstddef>
#include <optional>

namespace gpipe {

/// The edges of a node's two factors.
using Factors = std::array<std::size_t, 2>;

/// Returns the factors of a matrix product or convolution, whose kernels compute the gradient of each factor apart. Empty
/// for other nodes, and if the node's saved tensors have hooks: then each run of the node can run a user's code, such as
/// a recompute by torch.utils.checkpoint.
std::optional<Factors> factors_of(const torch::autograd::Node& node);

/// Whether a factor of the node is applied at each of several places of a sample, as the kernel of a convolution is.
bool is_convolution(const torch::autograd::Node& node);

}  // namespace gpipe
