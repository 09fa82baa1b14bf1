#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gpipe {

/// Returns a hash of the types, the sizes and some elements of tensors, of each the first, the last and a few between. Costs
/// little for large tensors. Other values almost always have another hash. Returns 0 if a tensor's values are not in plain
/// memory of the host.
std::uint64_t sample_hash(const std::vector<at::Tensor>& tensors);

}  // namespace gpipe
