#include "gpipe/autograd/boundary.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <limits>
#include <utility>

namespace gpipe {

using torch::autograd::variable_list;

GradientSink::GradientSink()
    : Node(std::numeric_limits<std::uint64_t>::max()), made(at::sequence_number::get_and_increment()) {}

variable_list GradientSink::apply(variable_list&& gradients) {
  TORCH_CHECK(sums != nullptr,
              "[gpipe] a backward reached the graph inside a pipeline through a tensor that a layer kept from its "
              "forward; keep a detached tensor instead");
  for (std::size_t i = 0; i < gradients.size(); ++i) sums->add(indices[i], std::move(gradients[i]));
  return {};
}

std::shared_ptr<GradientSink> make_gradient_sink() { return {new GradientSink(), torch::autograd::deleteNode}; }

variable_list Leave::apply(variable_list&& gradients) { return std::move(gradients); }

at::Tensor enter(const at::Tensor& tensor) {
  auto entering = tensor.detach();
  torch::autograd::set_history(entering, make_gradient_sink());
  return entering;
}

Value append_node(const Value& value, const std::shared_ptr<torch::autograd::Node>& node) {
  auto tensors = value.tensors();
  for (auto& tensor : tensors) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
    tensor = tensor.detach();
    torch::autograd::set_history(tensor, node);
  }
  return Value(value.form(), std::move(tensors));
}

torch::autograd::Edge leave(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return {};
  auto node = std::shared_ptr<Leave>(new Leave(), torch::autograd::deleteNode);
  node->add_input_metadata(tensor);
  node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
  return {std::move(node), 0};
}

}  // namespace gpipe
