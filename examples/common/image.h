#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>

namespace gpipe::examples {

/// Width and height in pixels.
struct Size {
  int width = 0;
  int height = 0;

  bool operator==(const Size&) const = default;
};
/// Writes a size such as "192x128".
std::string to_string(Size size);
/// Reads what to_string() writes. Errors: std::invalid_argument for any other text.
Size to_size(const std::string& text);
/// `size` times a scale in (0, 1], rounded, at least one pixel per side. Errors: std::invalid_argument for another
/// scale.
Size scaled(Size size, double scale);

// Images are tensors of uint8: [3, height, width] with red, green and blue, or [height, width] of grey levels or
// classes.
//
// The format, JPEG, PNG or GIF, is found by content, not by name. Of a GIF, the first frame is read. Alpha channels are
// and gamma are ignored. Images are turned as their EXIF orientation says. CMYK becomes RGB as in Pillow. Errors:
// std::runtime_error with the file's name and the reason, for a file that is missing, of another kind, damaged or
// truncated, for 16 bits per channel, for more than 65535 pixels per side or 2^28 in all, and for more pixels than the
// file's bytes can hold.

/// Reads only the header.
Size image_size(const std::filesystem::path& path);

/// Returns [3, height, width], resized if a size is wanted. A JPEG is decoded no larger than needed, which is faster.
at::Tensor read_image(const std::filesystem::path& path, std::optional<Size> wanted = std::nullopt);

/// Interpolates when it enlarges. When it shrinks, every source pixel counts.
at::Tensor resize_smoothly(const at::Tensor& image, Size size);
/// Takes the nearest pixel, so that classes remain classes.
at::Tensor resize_nearest(const at::Tensor& labels, Size size);

}  // namespace gpipe::examples
