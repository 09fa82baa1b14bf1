#pragma once

#include "gpipe/layer.h"

namespace torch::nn {
class SequentialImpl;
}

namespace gpipe {

/// Whether two lists hold the same tensors, in the same order.
bool are_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// Returns the name under which a container registers a layer's module: LibTorch allows no dots in it.
std::string registered_name(const std::string& layer);

/// Wraps all children of a Sequential, in order. Errors: std::invalid_argument for parameters or buffers of its own.
std::vector<std::unique_ptr<Layer>> make_layers(const torch::nn::SequentialImpl& model);

}  // namespace gpipe
