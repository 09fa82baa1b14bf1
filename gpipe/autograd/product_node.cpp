#include "gpipe/autograd/product_node.h"

#include <torch/csrc/autograd/generated/Functions.h>

#include <typeinfo>

namespace gpipe {

namespace nodes = torch::autograd::generated;
using torch::autograd::Node;

std::optional<Factors> factors_of(const Node& node) {
  const auto& type = typeid(node);
  const auto factors = [](const torch::autograd::SavedVariable& one, const torch::autograd::SavedVariable& other,
                          Factors edges) {
    return one.has_hooks() || other.has_hooks() ? std::nullopt : std::optional(edges);
  };
  if (type == typeid(nodes::AddmmBackward0)) {
    const auto& it = static_cast<const nodes::AddmmBackward0&>(node);
    return factors(it.mat1_, it.mat2_, {1, 2});
  }
  if (type == typeid(nodes::MmBackward0)) {
    const auto& it = static_cast<const nodes::MmBackward0&>(node);
    return factors(it.self_, it.mat2_, {0, 1});
  }
  if (type == typeid(nodes::BmmBackward0)) {
    const auto& it = static_cast<const nodes::BmmBackward0&>(node);
    return factors(it.self_, it.mat2_, {0, 1});
  }
  if (type == typeid(nodes::BaddbmmBackward0)) {
    const auto& it = static_cast<const nodes::BaddbmmBackward0&>(node);
    return factors(it.batch1_, it.batch2_, {1, 2});
  }
  if (type == typeid(nodes::LinearBackward0)) {
    const auto& it = static_cast<const nodes::LinearBackward0&>(node);
    return factors(it.input_, it.weight_, {0, 1});
  }
  if (type == typeid(nodes::ConvolutionBackward0)) {
    const auto& it = static_cast<const nodes::ConvolutionBackward0&>(node);
    return factors(it.input_, it.weight_, {0, 1});
  }
  if (type == typeid(nodes::ConvolutionOverrideableBackward0)) {
    const auto& it = static_cast<const nodes::ConvolutionOverrideableBackward0&>(node);
    return factors(it.input_, it.weight_, {0, 1});
  }
  return std::nullopt;
}

bool is_convolution(const Node& node) {
  return typeid(node) == typeid(nodes::ConvolutionBackward0) ||
         typeid(node) == typeid(nodes::ConvolutionOverrideableBackward0);
}

}  // namespace gpipe
