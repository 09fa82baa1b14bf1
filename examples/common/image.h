#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

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
// GraphicsMagick reads JPEG, PNG, GIF and TIFF files, found by content, not by name: of several images the first, without
// alpha and gamma, turned as EXIF says. Errors: std::runtime_error with the file's name and the reason, for a file that
// is missing, of another kind, damaged or cut short, and for more than 65535 pixels per side or 2^28 in all.

/// Whether a file has an ending of such images, and is not hidden, as ._a.png of macOS is.
bool is_named_as_image(const std::filesystem::path& path);

Size image_size(const std::filesystem::path& path);

/// Returns [3, height, width], resized if a size is wanted. A JPEG is decoded no larger than needed, which is faster.
at::Tensor read_image(const std::filesystem::path& path, std::optional<Size> wanted = std::nullopt);
/// Returns what the file says of red, green and blue, [3, height, width] of int: up to 65535 with 16 bits per channel.
at::Tensor read_numbers(const std::filesystem::path& path);

/// Interpolates when it enlarges. When it shrinks, every source pixel counts.
at::Tensor resize_smoothly(const at::Tensor& image, Size size);
/// Takes the nearest pixel, so that classes remain classes.
at::Tensor resize_nearest(const at::Tensor& labels, Size size);

/// Writes a PNG file. Errors: std::runtime_error with the path.
void write_png(const std::filesystem::path& path, const at::Tensor& image);
/// Returns a picture of columns of images, [n, 3, h, w] with values 0 to 1. Enlarges small ones by a whole number.
at::Tensor draw_table(const std::vector<at::Tensor>& columns);

}  // namespace gpipe::examples
