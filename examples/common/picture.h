#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "examples/common/image.h"

namespace gpipe::examples {

/// A picture with a row a sample and a column a tensor, thin lines between; such as images | true masks | predictions.
///
/// Each tensor is [n, 3, h, w] with values 0 to 1 (those outside are clamped), any floating type, any device; n >= 1.
/// Throws std::invalid_argument for other or differing shapes.
Image draw_picture(const std::vector<at::Tensor>& columns);

/// One tensor [3, h, w] or [1, h, w] as a picture of its own.
Image to_image(const at::Tensor& tensor);

}  // namespace gpipe::examples
