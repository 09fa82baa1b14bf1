#include "gpipe/ranks/gradient_buckets.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <utility>

#include "gpipe/base/checks.h"
#include "gpipe/ranks/wire.h"

namespace gpipe {
namespace {

// Cuts the elements of a bucket's parameters into equal shares.
GradientBucket cut_into_shares(const std::vector<std::size_t>& bucket, const std::vector<at::Tensor>& parameters,
                               int replicas) {
  std::int64_t total = 0;
  for (const auto p : bucket) total += parameters[p].numel();
  GradientBucket cut{std::vector<std::vector<GradientPiece>>(replicas)};
  std::int64_t before = 0;  // elements of earlier parameters
  for (const auto p : bucket) {
    const auto size = parameters[p].numel();
    for (int r = 0; r < replicas; ++r) {
      const auto begin = std::max<std::int64_t>(total * r / replicas - before, 0);
      const auto end = std::min(total * (r + 1) / replicas - before, size);
      if (begin < end) cut.shares[r].push_back({p, begin, end});
    }
    before += size;
  }
  return cut;
}

// The strides of a gradient, as PyTorch chooses those of `.grad`.
std::vector<std::int64_t> strides_for(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  std::vector<std::int64_t> strides(parameter.dim(), 1);
  for (auto d = parameter.dim() - 1; d > 0; --d) {
    strides[d - 1] = strides[d] * std::max<std::int64_t>(parameter.size(d), 1);
  }
  return strides;
}

bool lies_in(const at::Tensor& gradient, const std::vector<std::int64_t>& strides) {
  for (std::int64_t d = 0; d < gradient.dim(); ++d) {
    if (gradient.size(d) > 1 && gradient.stride(d) != strides[d]) return false;
  }
  return true;
}

}  // namespace

std::vector<GradientBucket> cut_into_buckets(const std::vector<at::Tensor>& parameters, int replicas,
                                             std::int64_t bytes) {
  std::vector<std::vector<std::size_t>> buckets;  // indices of parameters
  std::int64_t present = bytes;                   // in the last bucket
  for (auto p = parameters.size(); p-- > 0;) {
    if (present >= bytes) {
      buckets.emplace_back();
      present = 0;
    }
    buckets.back().push_back(p);
    present += static_cast<std::int64_t>(parameters[p].nbytes());
  }
  std::vector<GradientBucket> cut;
  for (const auto& bucket : buckets) cut.push_back(cut_into_shares(bucket, parameters, replicas));
  return cut;
}

std::int64_t reduction_bytes(int replicas, std::int64_t gradients, std::int64_t largest) {
  const auto share_of = [&](std::int64_t bytes) { return (bytes + replicas - 1) / replicas; };
  const auto message = share_of(std::min(gradients, kBucketBytes + largest));
  const auto posted = static_cast<std::int64_t>(most_posted(message));
  // From each other replica come parts on one wire and sums on another. One message of each is in use.
  return 2 * (replicas - 1) * std::min(share_of(gradients), posted + message);
}

at::Tensor in_parameters_order(at::Tensor gradient, const at::Tensor& parameter) {
  if (gradient.layout() != at::kStrided) {
    refuse_argument(
        "a parameter has a sparse gradient, which replicas cannot sum; use a layer without sparse gradients");
  }
  const auto strides = strides_for(parameter);
  if (gradient.is_cpu() && lies_in(gradient, strides)) return gradient;
  return at::empty_strided(gradient.sizes(), strides, gradient.options().device(at::kCPU)).copy_(gradient);
}

at::Tensor piece_of(const at::Tensor& gradient, const GradientPiece& piece) {
  return gradient.as_strided({piece.end - piece.begin}, {1}, gradient.storage_offset() + piece.begin);
}

}  // namespace gpipe
