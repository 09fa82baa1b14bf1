#include "gpipe/autograd/product_node.h"

#include <torch/csrc/autograd/generated/Functions.h>

#include <typeinfo>

namespace gpipe {

namespace nodes = torch::autograd::generated;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

namespace {

/// Whether the node is a Product whose two saved factors have no hooks.
template <class Product>
bool is_plain(const Node& node, SavedVariable Product::*one, SavedVariable Product::*other) {
  if (typeid(node) != typeid(Product)) return false;
  const auto& product = static_cast<const Product&>(node);
  return !(product.*one).has_hooks() && !(product.*other).has_hooks();
}

}  // namespace

std::optional<Factors> factors_of(const Node& node) {
  using namespace torch::autograd::generated;
  const bool behind_a_term = is_plain(node, &AddmmBackward0::mat1_, &AddmmBackward0::mat2_) ||
                             is_plain(node, &BaddbmmBackward0::batch1_, &BaddbmmBackward0::batch2_);
  if (behind_a_term) return Factors{1, 2};
  const bool in_front =
      is_plain(node, &MmBackward0::self_, &MmBackward0::mat2_) ||
      is_plain(node, &BmmBackward0::self_, &BmmBackward0::mat2_) ||
      is_plain(node, &LinearBackward0::input_, &LinearBackward0::weight_) ||
      is_plain(node, &ConvolutionBackward0::input_, &ConvolutionBackward0::weight_) ||
      is_plain(node, &ConvolutionOverrideableBackward0::input_, &ConvolutionOverrideableBackward0::weight_);
  return in_front ? std::optional(Factors{0, 1}) : std::nullopt;
}

bool is_convolution(const Node& node) {
  return typeid(node) == typeid(nodes::ConvolutionBackward0) ||
         typeid(node) == typeid(nodes::ConvolutionOverrideableBackward0);
}

}  // namespace gpipe
