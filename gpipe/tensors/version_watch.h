#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

namespace gpipe {

/// A tensor's version counter; 0 for undefined and inference tensors, which have none.
inline std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? static_cast<std::uint32_t>(tensor._version()) : 0;
}

/// Notes a tensor's version counter without keeping its memory.
class VersionWatch {
 public:
  VersionWatch() = default;
  explicit VersionWatch(const at::Tensor& tensor) : noted_(version_of(tensor)) {
    if (tensor.defined() && !tensor.is_inference()) counter_ = tensor.unsafeGetTensorImpl()->version_counter();
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

/// A weak reference to a tensor, which prevents another tensor from getting the same address.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

}  // namespace gpipe
