#pragma once

#include <ATen/core/Tensor.h>

#include "examples/common/image.h"

namespace gpipe::examples {

/// A picture with a row a sample, thin lines between: image | true mask | predicted mask.
///
/// images [n, 3, h, w] with values 0 to 1; truth and prediction [n, 1, h, w], 0 (black) to 1 (white), so that
/// probabilities show as greys. Values outside are clamped. Any floating type, any device, n >= 1. Throws
/// std::invalid_argument for other shapes.
Image draw_picture(const at::Tensor& images, const at::Tensor& truth, const at::Tensor& prediction);

}  // namespace gpipe::examples
