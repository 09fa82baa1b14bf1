#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpipe {

/// A part of a parameter's gradient: elements in the order of its memory.
struct GradientPiece {
  std::size_t parameter;
  std::int64_t begin;
  std::int64_t end;
};

/// Parameters of a stage whose gradients travel together. Their elements, one after the other, are cut into one share per
/// replica, which sums it.
struct GradientBucket {
  std::vector<std::vector<GradientPiece>> shares;  ///< per replica
};

inline constexpr std::int64_t kBucketBytes = std::int64_t{4} << 20;

/// Returns the buckets of a stage's parameters: in reverse order, and of at least `bytes` each, except the last. Depends on the
/// parameters' sizes only. (PyTorch Distributed, Li et al., arXiv:2006.15704, section 3.2.3)
std::vector<GradientBucket> cut_into_buckets(const std::vector<at::Tensor>& parameters, int replicas,
                                             std::int64_t bytes);

/// Returns about how many bytes a replica needs to sum a stage's gradients of `gradients` bytes, besides these: the parts and
/// sums that it receives. `largest` is the most of one parameter. Does not count the copies of small messages being sent.
std::int64_t reduction_bytes(int replicas, std::int64_t gradients, std::int64_t largest);

/// Returns a gradient on the CPU with the parameter's strides, so that the elements lie alike on all replicas. Returns it
/// as it is if it lies so. Errors: std::invalid_argument for a sparse gradient.
at::Tensor in_parameters_order(at::Tensor gradient, const at::Tensor& parameter);

/// Returns the memory of a piece. REQUIRES: `gradient` lies as in_parameters_order().
at::Tensor piece_of(const at::Tensor& gradient, const GradientPiece& piece);

}  // namespace gpipe
