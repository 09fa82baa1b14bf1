#pragma once

#include <ATen/core/Tensor.h>

namespace gpipe {

/// Whether two tensors share an element, so that an in-place change of one may change the other. Exact for common views,
/// such as slices of rows or columns. Returns true where an exact answer would take too long.
bool overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace gpipe
