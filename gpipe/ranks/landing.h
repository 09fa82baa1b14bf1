#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace gpipe {

/// Returns the elements of a tensor that travel to another rank, in memory without gaps: what strides of 0 repeat once. Both
/// ends have tensors of the same sizes and strides, so they agree on the order.
at::Tensor elements_of(const at::Tensor& tensor);

/// Receives tensors, also ones whose memory has gaps.
class Landing {
 public:
  /// Adds a tensor that will get its values.
  void add(const at::Tensor& tensor);
  /// The memory without gaps into which to receive, one tensor per add().
  const std::vector<at::Tensor>& received() const { return received_; }
  /// Gives the tensors with gaps their values. Call when all have been received, on the stream that has.
  void scatter();

 private:
  std::vector<at::Tensor> received_;
  std::vector<std::pair<at::Tensor, at::Tensor>> with_gaps_;  // to and from
};

}  // namespace gpipe
