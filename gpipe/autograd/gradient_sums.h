#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "gpipe/tensors/parcel.h"

namespace gpipe {

/// Returns the tensor itself if no other tensor shares its memory, otherwise a clone. The result can become the gradient
/// of a leaf, to which PyTorch adds in place. The caller must give up its reference.
at::Tensor unshared(at::Tensor tensor);

/// Sums of gradients, each in the order of add().
class GradientSums {
 public:
  explicit GradientSums(std::size_t count = 0) : sums_(count), owned_(count) {}

  /// Makes sums for more indices, up to `count`.
  void grow(std::size_t count);

  /// Undefined gradients are skipped. A sum without gradients stays undefined.
  void add(std::size_t index, at::Tensor gradient);
  /// Returns the sums and ends their use.
  Gradients take() { return std::move(sums_); }
  /// As take(), with sums that share memory with no other tensor; see unshared().
  Gradients take_unshared();

 private:
  Gradients sums_;
  /// Whether the sum's memory belongs to it alone, so that add() may write to it.
  std::vector<bool> owned_;
};

}  // namespace gpipe
