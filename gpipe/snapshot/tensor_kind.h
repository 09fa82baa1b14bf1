#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace gpipe {

/// A tensor's type and shape, and its layout where that is not the common one. Where two tensors' kinds are equal, one
/// can be copied into the other.
std::string kind_of(const at::Tensor& tensor);

}  // namespace gpipe
