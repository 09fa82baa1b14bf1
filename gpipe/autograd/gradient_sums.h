#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "gpipe/autograd/parcel.h"

namespace gpipe {

/// The tensor itself when it is the only one to show its memory, otherwise a clone: what may become the gradient of a
/// leaf, which is added to in place. The caller gives up its reference.
at::Tensor unshared(at::Tensor tensor);

/// A row of gradients, each the sum of what was added to it, in that order.
class GradientSums {
 public:
  explicit GradientSums(std::size_t count = 0) : sums_(count), owned_(count) {}

  /// An undefined gradient counts as zero, and leaves a sum undefined that has no other.
  void add(std::size_t index, at::Tensor gradient);
  /// Ends the sums' use.
  Gradients take() { return std::move(sums_); }
  /// The same; no sum shares memory with another tensor, so that it can become a parameter's gradient.
  Gradients take_unshared();

 private:
  Gradients sums_;
  /// Whether the sum's memory is ours alone, so that it may be added to in place.
  std::vector<bool> owned_;
};

}  // namespace gpipe
