#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <vector>

namespace gpipe {

/// A pipeline's backward: takes the gradients of its outputs (undefined for zero) and returns those of its inputs. With
/// `retain_graph` it must be repeatable. Called on the thread that runs the autograd engine.
using BackwardFunction = std::function<std::vector<at::Tensor>(std::vector<at::Tensor> gradients, bool retain_graph)>;

/// Makes one autograd node the history of those `outputs` that are `differentiable`. The node's `inputs` are the
/// pipeline's inputs and parameters, so that autograd::grad, hooks and DDP see each of them once. The function lives until
/// a backward without retain_graph, or as long as the graph. It runs on the streams that are current now on `devices` and
/// on the outputs' devices. REQUIRES: outputs are detached.
/// Errors, in backward: c10::NotImplementedError for create_graph; c10::Error for a second backward without
/// retain_graph; what the function throws, or std::runtime_error if that is not a std::exception.
void attach_backward(const std::vector<at::Tensor>& outputs, const std::vector<bool>& differentiable,
                     const std::vector<at::Tensor>& inputs, std::vector<c10::Device> devices,
                     BackwardFunction function);

}  // namespace gpipe
