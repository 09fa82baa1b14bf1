#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gpipe/value.h"

namespace gpipe {

/// Notes a tensor's version counter without keeping its memory.
class VersionWatch {
 public:
  VersionWatch() = default;
  explicit VersionWatch(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_inference()) return;
    counter_ = tensor.unsafeGetTensorImpl()->version_counter();
    noted_ = counter_.current_version();
  }
  /// Whether the tensor, or another one with the same counter, has been changed in place since.
  bool changed() const { return counter_.enabled() && counter_.current_version() != noted_; }
  /// Makes the counter what it was.
  void put_back() {
    if (changed()) counter_.set_version(noted_);
  }

 private:
  c10::VariableVersion counter_;  // none for undefined and inference tensors
  std::uint32_t noted_ = 0;
};

/// The version of a tensor; 0 for one that has none.
inline std::uint32_t version_of(const at::Tensor& tensor) {
  const bool has_version = tensor.defined() && !tensor.is_inference();
  return has_version ? tensor.unsafeGetTensorImpl()->version_counter().current_version() : 0;
}
/// Sets the version of a tensor that has one.
inline void set_version(const at::Tensor& tensor, std::uint32_t version) {
  if (!tensor.defined() || tensor.is_inference()) return;
  auto counter = tensor.unsafeGetTensorImpl()->version_counter();
  counter.set_version(version);
}

/// A weak reference to a tensor, which prevents another tensor from getting the same address.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Returns the defined tensors, each once. Modules may share a tensor.
std::vector<at::Tensor> distinct(std::vector<at::Tensor> tensors);

/// Returns the place of a tensor in a list; the list's size if it is not there.
std::size_t index_of(const at::Tensor& tensor, const std::vector<at::Tensor>& tensors);

/// A tensor of so many bytes or more is large.
inline constexpr std::int64_t kLargeBytes = 64 << 10;
inline bool is_large(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size() >= kLargeBytes; }

/// Identifies the memory of a tensor that crosses a cut.
struct AliasGroup {
  static constexpr std::uint64_t kNone = 0;
  /// Equal for tensors that share elements. Copies to another device keep it, and so does a tensor that a stage passes
  /// on. kNone: no other tensor that crossed a cut shares this memory.
  std::uint64_t number = kNone;
  /// The last stage that another tensor that shares it goes to; -1 for none.
  int shared_until = -1;
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

/// Replaces the tensors of the first `count` parcels by copies.
std::vector<Parcel> with_copies(std::vector<Parcel> parcels, std::size_t count);

using Gradients = std::vector<at::Tensor>;

/// Whether an in-place change of one tensor may change the other. Exact for tensors without gaps, such as slices of rows;
/// true for others of one memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);

/// Detects in-place changes of tensors that share memory with another tensor across a cut, during one run of a cell.
/// Autograd misses them, because a tensor that crosses a cut is detached, and may be a copy. Used by one thread.
class AliasCheck {
 public:
  /// Adds an input: the tensor that the layers get, and its parcel's alias group.
  void enters(const at::Tensor& tensor, const AliasGroup& group);

  /// Call after each layer. Errors: std::runtime_error if it has changed an input whose memory another one shares.
  void check(int stage, const std::string& layer) const;

  /// Sets the alias groups of the tensors that leave the cell. `stages[k]` is the last stage that out[k] goes to.
  void leaves(std::vector<Parcel>& out, const std::vector<int>& stages) const;

 private:
  struct Entering {
    at::Tensor tensor;
    VersionWatch version;
    AliasGroup group;
  };
  std::vector<Entering> entering_;
};

/// Returns the alias groups of a mini-batch's inputs, all with numbers: outputs that share their memory are found.
std::vector<AliasGroup> alias_groups_of_inputs(const std::vector<at::Tensor>& inputs);

}  // namespace gpipe
