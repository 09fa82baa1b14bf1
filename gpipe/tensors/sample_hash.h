#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gpipe {

/// Returns a hash of the types, the sizes and a few elements of tensors, also the first and the last. Other values
/// almost always have another hash. Returns 0 if a tensor's values are not in plain memory of the host.
std::uint64_t sample_hash(const std::vector<at::Tensor>& tensors);

}  // namespace gpipe
