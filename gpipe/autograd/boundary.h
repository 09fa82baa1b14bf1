#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/autograd/gradient_sums.h"
#include "gpipe/tensors/value.h"

namespace gpipe {

/// Sink node of a cell's graph, for inputs and parameters. Adds incoming gradients to `sums`. The engine runs it before
/// any other ready node.
struct GradientSink : torch::autograd::Node {
  GradientSink();

  /// Its place in the sequence of nodes that its thread has made.
  const std::uint64_t made;
  /// The index in `sums` of each input of the node.
  std::vector<std::size_t> indices;
  /// The sums of the running backward; null between backwards.
  GradientSums* sums = nullptr;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "GPipeGradientSink"; }
};

std::shared_ptr<GradientSink> make_gradient_sink();

/// Root node of a cell's graph: the identity. Each leaving value has a node of its own, so that the gradients of a value
/// that leaves twice sum in the order of leaving, whatever the balance.
struct Leave : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "GPipeLeave"; }
};

/// Returns an input of a cell: shares memory with `tensor`, requires grad, and is neither a leaf nor a view, so that
/// in-place operations work on it. Its node is a GradientSink; the caller sets its indices.
at::Tensor enter(const at::Tensor& tensor);

/// Inserts `node` behind `value`: returns its tensors detached, with `node` as the history of those that require grad,
/// and makes their former history the next edges of `node`, in order.
Value append_node(const Value& value, const std::shared_ptr<torch::autograd::Node>& node);

/// Returns the root edge of a leaving tensor; invalid if it does not require grad.
torch::autograd::Edge leave(const at::Tensor& tensor);

}  // namespace gpipe
