#include "gpipe/autograd/gradient_sums.h"

#include <utility>

namespace gpipe {

void GradientSums::add(std::size_t index, at::Tensor gradient) {
  if (!gradient.defined()) return;
  auto& sum = sums_[index];
  if (!sum.defined()) {
    sum = std::move(gradient);  // may be shared with another gradient, or with the graph
  } else if (owned_[index] && sum.layout() == gradient.layout()) {
    sum.add_(gradient);
  } else {
    sum = sum.is_sparse() ? gradient + sum : sum + gradient;  // a sparse one takes nothing dense
    owned_[index] = true;
  }
}

}  // namespace gpipe
