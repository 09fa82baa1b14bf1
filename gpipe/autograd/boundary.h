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
#include "gpipe/autograd/value.h"

namespace gpipe {

/// The graph's end: where a value enters a cell, or where its parameters are. Adds the gradients that arrive to sums,
/// as soon as they are there: the engine runs it before all else. (Asking the engine for gradients of inputs would have
/// it plan each backward anew.)
struct GradientSink : torch::autograd::Node {
  GradientSink();

  /// When it was made, in the sequence of its thread's nodes.
  const std::uint64_t made;
  /// Which of the sums is each of the node's inputs.
  std::vector<std::size_t> indices;
  /// Of the backward under way.
  GradientSums* sums = nullptr;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "GPipeGradientSink"; }
};

std::shared_ptr<GradientSink> make_gradient_sink();

/// The graph's root where a value leaves a cell. An identity of its own, so that gradients of a value that leaves twice
/// sum in the order of leaving, whatever the balance.
struct Leave : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "GPipeLeave"; }
};

/// `tensor` as it enters a cell: shares its memory, requires grad, is neither a leaf nor a view, so that in-place
/// operations work on it. Its node is a GradientSink, whose index is the caller's to set.
at::Tensor enter(const at::Tensor& tensor);

/// `value` with a node of its own behind it: those of its tensors that require grad, detached, get `node` as their
/// history, in their order, and `node` gets theirs as its next edges.
Value put_behind(const Value& value, const std::shared_ptr<torch::autograd::Node>& node);

/// The root edge of a value that leaves; invalid when the tensor requires no grad.
torch::autograd::Edge leave(const at::Tensor& tensor);

}  // namespace gpipe
