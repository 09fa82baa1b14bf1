#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace gpipe {

/// What a pipeline's backward does: takes the gradients of its outputs (undefined: zero) and returns those of its
/// inputs; `retain_graph` asks that it can be done again. Called on whatever thread runs the autograd engine.
using BackwardFunction = std::function<std::vector<at::Tensor>(std::vector<at::Tensor> gradients, bool retain_graph)>;

/// Makes one autograd node with `inputs` (inputs and parameters of the pipeline alike, so that autograd::grad, hooks
/// and DDP see each once) and gives its history to the `outputs`, whose `differentiable` flag is set; they must be
/// detached. The function lives as long as the graph, or until a backward that does not retain it. Errors in backward:
/// c10::NotImplementedError for create_graph, c10::Error for a second backward that was not prepared by retain_graph,
/// and what the function throws, unchanged; a std::runtime_error instead of what is no std::exception.
void attach_backward(const std::vector<at::Tensor>& outputs, const std::vector<bool>& differentiable,
                     const std::vector<at::Tensor>& inputs, BackwardFunction function);

}  // namespace gpipe
