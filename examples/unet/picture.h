#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>

namespace gpipe::unet {

/// Writes a PNG with a row a sample, thin lines between: image | true mask | predicted mask.
///
/// images [n, 3, h, w] with values 0 to 1; truth and prediction [n, 1, h, w], 0 (black) to 1 (white), so that
/// probabilities show as greys. Values outside are clamped. Any floating type, any device, n >= 1. Throws
/// std::invalid_argument for other shapes, std::runtime_error that names the path where it cannot be written.
void write_picture(const std::filesystem::path& path, const at::Tensor& images, const at::Tensor& truth,
                   const at::Tensor& prediction);

}  // namespace gpipe::unet
