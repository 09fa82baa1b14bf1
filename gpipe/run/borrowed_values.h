#pragma once

#include <ATen/core/Tensor.h>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "gpipe/base/mutex.h"
#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {

/// The values of the parameters that stages of this rank borrow from stages of other ranks, during one mini-batch. This rank
/// has a copy of each such parameter, with which its layers compute.
///
/// Thread safety: the workers of this rank call receive().
class BorrowedValues {
 public:
  /// Gives `copy`, in the first call of a mini-batch, the value and requires_grad of the owner's parameter, which has come as
  /// `lent`. A copy that changes gets a new version, so that graphs of earlier mini-batches refuse to use it. On the copy's
  /// device, the copy takes the place of the tensor in `lent`. Errors: std::runtime_error if their types or shapes differ.
  void receive(Parcel& lent, at::Tensor copy);

 private:
  Mutex mutex_;
  absl::flat_hash_map<const void*, StreamEvent> received_ ABSL_GUARDED_BY(mutex_);  // by copy: when it has its value
};

}  // namespace gpipe
