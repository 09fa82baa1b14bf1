#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "gpipe/autograd/value.h"

namespace gpipe {

/// Which memory a tensor shows that has crossed a cut.
struct Memory {
  static constexpr std::uint64_t kOwn = 0;
  /// Equal for tensors that share elements; kept by copies, and where a stage passes a tensor on. kOwn: no other tensor
  /// that has crossed a cut shows this memory.
  std::uint64_t number = kOwn;
  /// Whether another tensor that shows it goes to the same stage or a later one.
  bool shown_later = false;
};

/// What an edge carries for one micro-batch: detached tensors, and of each whether a gradient is wanted back. A skip is
/// a parcel of one tensor, which may be undefined. Gradients travel as plain vectors parallel to `tensors`; an
/// undefined gradient stands for zero.
struct Parcel {
  Value::Form form = Value::Form::kTensor;
  std::vector<at::Tensor> tensors;
  std::vector<bool> wants_gradient;
  /// The tensors' version counters when they were sent: a later change in place shows.
  std::vector<std::uint32_t> versions;
  std::vector<Memory> memory;

  /// Adds a tensor (detached by the caller, or undefined).
  void add(at::Tensor tensor, bool gradient_wanted, Memory memory = {});
  /// Whether a tensor was changed in place since `versions` was written.
  bool changed() const;
  /// Writes `versions` anew, after tensors were replaced by copies.
  void renew_versions();
};

/// A tensor's version counter; 0 for undefined and inference tensors, which have none.
std::uint32_t version_of(const at::Tensor& tensor);

using Gradients = std::vector<at::Tensor>;

}  // namespace gpipe
