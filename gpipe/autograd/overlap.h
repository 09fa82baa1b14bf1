#pragma once

#include <ATen/core/Tensor.h>

namespace gpipe {

/// Whether two tensors share an element, so that a change of one in place may change the other. Exact for views of
/// usual shapes, such as slices of rows and of columns; true where it would take too long to tell.
bool overlap(const at::Tensor& a, const at::Tensor& b);

}  // namespace gpipe
