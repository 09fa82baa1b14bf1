#include "gpipe/autograd/gradient_sums.h"

#include <utility>

namespace gpipe {
namespace {

// Whether no other tensor shares the memory, and each element has a place of its own. A view may own its base: a
// weight's gradient can be a transposed product.
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

}  // namespace gpipe
