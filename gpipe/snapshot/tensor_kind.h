#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace gpipe {

/// Describes a tensor's type and shape, and its layout if that is not strided. Tensors of equal kinds can be copied
/// into each other.
std::string kind_of(const at::Tensor& tensor);

}  // namespace gpipe
