#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "gpipe/autograd/parcel.h"

namespace gpipe {

/// A row of gradients, each the sum of what was added to it, in that order.
class GradientSums {
 public:
  explicit GradientSums(std::size_t count = 0) : sums_(count), owned_(count) {}

  /// An undefined gradient counts as zero, and leaves a sum undefined that has no other.
  void add(std::size_t index, at::Tensor gradient);
  /// Ends the sums' use.
  Gradients take() { return std::move(sums_); }

 private:
  Gradients sums_;
  /// Whether the sum's memory is ours alone, so that it may be added to in place.
  std::vector<bool> owned_;
};

}  // namespace gpipe
