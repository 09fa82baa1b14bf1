#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <utility>

#include "absl/container/flat_hash_map.h"

namespace gpipe {

/// A weak reference to a tensor, which prevents another tensor from getting the same address.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// A map with weak references to tensors as keys. An entry is removed after its tensor is destroyed.
template <typename Known>
class WeakTensorMap {
 public:
  const Known* find(const at::Tensor& tensor) const {
    const auto found = known_.find(tensor.unsafeGetTensorImpl());
    return found == known_.end() ? nullptr : &found->second.second;
  }

  void insert(const at::Tensor& tensor, Known known) {
    absl::erase_if(known_, [](const auto& each) { return each.second.first.expired(); });
    known_.insert_or_assign(tensor.unsafeGetTensorImpl(),
                            std::pair(WeakTensor(tensor.getIntrusivePtr()), std::move(known)));
  }

 private:
  absl::flat_hash_map<const c10::TensorImpl*, std::pair<WeakTensor, Known>> known_;
};

}  // namespace gpipe
