#include "gpipe/autograd/boundary.h"

#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

namespace gpipe {

using torch::autograd::variable_list;

variable_list Capture::apply(variable_list&& arrived) {
  TORCH_CHECK(!gradients.empty(),
              "[gpipe] a backward ran into the inside of a pipeline; a tensor that a layer kept from its forward can "
              "only be used detached");
  std::move(arrived.begin(), arrived.end(), gradients.begin());
  return {};
}

variable_list Leave::apply(variable_list&& gradients) { return std::move(gradients); }

at::Tensor enter(const at::Tensor& tensor) {
  auto entering = tensor.detach();
  torch::autograd::set_history(entering, std::shared_ptr<Capture>(new Capture(), torch::autograd::deleteNode));
  return entering;
}

torch::autograd::Edge leave(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return {};
  auto node = std::shared_ptr<Leave>(new Leave(), torch::autograd::deleteNode);
  node->add_input_metadata(tensor);
  node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
  return {std::move(node), 0};
}

}  // namespace gpipe
