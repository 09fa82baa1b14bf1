#include "gpipe/ranks/landing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "gpipe/tensors/transfer.h"

namespace gpipe {

at::Tensor elements_of(const at::Tensor& tensor) {
  const auto elements = without_repeats(tensor);
  return elements.is_non_overlapping_and_dense() ? elements : elements.contiguous();
}

void Landing::add(const at::Tensor& tensor) {
  auto elements = without_repeats(tensor);
  if (elements.is_non_overlapping_and_dense()) {
    received_.push_back(std::move(elements));
    return;
  }
  received_.push_back(at::empty(elements.sizes(), elements.options()));
  with_gaps_.emplace_back(std::move(elements), received_.back());
}

void Landing::scatter() {
  const at::NoGradGuard no_grad;
  for (const auto& [to, from] : with_gaps_) to.copy_(from);
}

}  // namespace gpipe
