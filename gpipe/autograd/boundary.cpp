#include "gpipe/autograd/boundary.h"

#include <ATen/SequenceNumber.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <limits>

namespace gpipe {
namespace {

// Whether only this tensor has the memory, without repeats. A view may own its base, as a weight's gradient often does.
bool owns_memory(const at::Tensor& tensor) {
  if (tensor.use_count() != 1 || tensor.layout() != at::kStrided) return false;
  std::size_t users = 1;
  if (tensor.is_view()) {
    const auto base = tensor._base();
    if (base.use_count() != 2) return false;  // the view's reference, and `base`
    users = 2;
  }
  return tensor.storage().use_count() == users && tensor.is_non_overlapping_and_dense();
}

}  // namespace

at::Tensor unshared(at::Tensor tensor) {
  const bool shared = tensor.defined() && tensor.layout() == at::kStrided && !owns_memory(tensor);
  return shared ? tensor.clone() : std::move(tensor);
}

void GradientSums::grow(std::size_t count) {
  if (count <= sums_.size()) return;
  sums_.resize(count);
  owned_.resize(count);
}

void GradientSums::add(std::size_t index, at::Tensor gradient) {
  if (!gradient.defined()) return;
  auto& sum = sums_[index];
  if (!sum.defined()) {
    sum = std::move(gradient);
    owned_[index] = owns_memory(sum);
  } else if (owned_[index] && sum.layout() == gradient.layout()) {
    sum.add_(gradient);
  } else {
    sum = sum.is_sparse() ? gradient + sum : sum + gradient;  // sparse + dense is not supported
    owned_[index] = true;
  }
}

Gradients GradientSums::take_unshared() {
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    if (!owned_[i]) sums_[i] = unshared(std::move(sums_[i]));
  }
  return std::move(sums_);
}

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

variable_list Leave::apply(variable_list&& gradients) { return std::move(gradients); }

at::Tensor enter(const at::Tensor& tensor) {
  auto entering = tensor.detach();
  torch::autograd::set_history(entering, make_node<GradientSink>());
  return entering;
}

Value append_node(const Value& value, const NodePtr<torch::autograd::Node>& node) {
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
  auto node = make_node<Leave>();
  node->add_input_metadata(tensor);
  node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
  return {std::move(node), 0};
}

}  // namespace gpipe
