#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace gpipe {

/// The graph's end where a value enters a cell, or a parameter: takes the gradient. (Asking the engine for gradients of
/// inputs would have it plan each backward anew, which costs more than a small layer.)
struct Capture : torch::autograd::Node {
  /// Where it goes, during a backward of the cell.
  at::Tensor* gradient = nullptr;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "GPipeCapture"; }
};

/// The graph's root where a value leaves a cell. An identity of its own, so that gradients of a value that leaves twice
/// sum in the order of leaving, whatever the balance.
struct Leave : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "GPipeLeave"; }
};

/// `tensor` as it enters a cell: shares its memory, requires grad, is neither a leaf nor a view, so that in-place
/// operations work on it.
at::Tensor enter(const at::Tensor& tensor);

/// The root edge of a value that leaves; invalid when the tensor requires no grad.
torch::autograd::Edge leave(const at::Tensor& tensor);

}  // namespace gpipe
