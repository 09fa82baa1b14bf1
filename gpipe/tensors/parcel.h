#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "gpipe/tensors/value.h"
#include "gpipe/tensors/version_watch.h"

namespace gpipe {

/// Identifies the memory of a tensor that crosses a cut.
struct AliasGroup {
  static constexpr std::uint64_t kNone = 0;
  /// Equal for tensors that share elements. Copies to another device keep it, and so does a tensor that a stage passes
  /// on. kNone: no other tensor that crossed a cut shares this memory.
  std::uint64_t number = kNone;
  /// Whether another tensor that shares it goes to the same stage or a later one.
  bool shared_later = false;
};

/// What an edge carries for one micro-batch: detached tensors, and whether each wants a gradient. A skip's parcel has
/// one tensor, which may be undefined. Gradients are vectors parallel to `tensors`; an undefined one is zero.
struct Parcel {
  Value::Form form = Value::Form::kTensor;
  std::vector<at::Tensor> tensors;
  std::vector<bool> wants_gradient;
  std::vector<VersionWatch> versions;  ///< when the tensors were sent, to detect later in-place changes
  std::vector<AliasGroup> alias_groups;

  /// Adds a tensor (detached by the caller, or undefined).
  void add(at::Tensor tensor, bool gradient_wanted, AliasGroup group = {}) {
    versions.emplace_back(tensor);
    alias_groups.push_back(group);
    tensors.push_back(std::move(tensor));
    wants_gradient.push_back(gradient_wanted);
  }
  /// Adds a tensor that leaves a cell: detached, and with the wish for a gradient if it requires one.
  void add_leaving(const at::Tensor& tensor) {
    add(tensor.defined() ? tensor.detach() : tensor, tensor.defined() && tensor.requires_grad());
  }
  /// Adds the tensors of a value so, and takes its form.
  void add_leaving(const Value& value) {
    form = value.form();
    for (const auto& tensor : value.tensors()) add_leaving(tensor);
  }
  Value value() const { return {form, tensors}; }
  /// Whether a tensor was changed in place since `versions` was set.
  bool changed() const { return std::ranges::any_of(versions, &VersionWatch::changed); }
  /// Sets `versions` to the present ones.
  void renew_versions() { versions = std::vector<VersionWatch>(tensors.begin(), tensors.end()); }
};

using Gradients = std::vector<at::Tensor>;

}  // namespace gpipe
