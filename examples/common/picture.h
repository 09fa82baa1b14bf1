#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "examples/common/image.h"

namespace gpipe::examples {

/// A column of a picture: one tile per sample.
struct Column {
  std::string title;  ///< see Text for its characters
  at::Tensor tiles;   ///< [n, 3, h, w] with values 0 to 1, of any floating type, on any device; others are clamped
};

/// Draws a table with one row per sample and one titled column per tensor, such as image, mask and prediction. Small
/// tiles are enlarged by a whole number, so that the longer side has at least 256 pixels.
/// Errors: std::invalid_argument for no columns, no samples, or shapes that differ.
Image draw_picture(const std::vector<Column>& columns);

/// Converts a tensor [3, h, w] or [1, h, w] to an image.
Image to_image(const at::Tensor& tensor);

}  // namespace gpipe::examples
