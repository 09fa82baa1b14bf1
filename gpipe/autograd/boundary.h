#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <span>

namespace gpipe {

/// The graph's end: where a value enters a cell, or where its parameters are, all in one node, for each that the engine
/// evaluates costs as much as a small layer. Takes the gradients. (Asking the engine for gradients of inputs would have
/// it plan each backward anew.)
struct Capture : torch::autograd::Node {
  /// Where they go, one an input of the node, during a backward of the cell.
  std::span<at::Tensor> gradients;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& arrived) override;
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
