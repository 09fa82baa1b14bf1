#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
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

/// Rows from the top, pixels from the left, the channels of a pixel next to each other. Three channels are red, green
/// and blue (sRGB). One channel is grey, or a mask of 0 and 1.
struct Image {
  Image() = default;
  /// All zero.
  Image(Size size, int channel_count);

  Size size() const { return {width, height}; }
  uint8_t* at(int x, int y) { return pixels.data() + offset(x, y); }
  const uint8_t* at(int x, int y) const { return pixels.data() + offset(x, y); }

  int width = 0;
  int height = 0;
  int channels = 0;
  std::vector<uint8_t> pixels;

 private:
  size_t offset(int x, int y) const { return (static_cast<size_t>(y) * width + x) * channels; }
};

// The functions that read files detect JPEG, PNG and GIF by content, not by name. Alpha channels and transparency are
// ignored: each pixel has the colour that the file gives it.
//
// Errors: std::runtime_error with the file's name and the reason, for a file that is missing, of another kind, damaged
// or truncated. Images of more than 65535 pixels per side or 2^28 in all are refused. So are images of more than 2^20
// pixels whose file is too short for them: at most 512 pixels per byte of a JPEG, 8256 of a PNG, 2730 of a GIF. No
// encoder exceeds these, except with JPEG's arithmetic coding.

/// Reads only the header.
Size image_size(const std::filesystem::path& path);

/// Three channels, at full size. Of a GIF, the first frame; pixels outside the frame are black.
Image read_image(const std::filesystem::path& path);
/// Resized to `wanted`. A JPEG is decoded no larger than needed, which is faster.
Image read_image(const std::filesystem::path& path, Size wanted);

/// One channel: 1 where the luminance is above 127, otherwise 0. A file whose values are all 0 or 1 is taken as it is.
Image read_mask(const std::filesystem::path& path);
/// Resized to `wanted` by the nearest pixel, so that values remain 0 and 1.
Image read_mask(const std::filesystem::path& path, Size wanted);

// Errors: std::runtime_error with the path, if it cannot be written; std::invalid_argument for an image that the format
// cannot hold. PNG and JPEG take one or three channels.

void write_png(const std::filesystem::path& path, const Image& image);
void write_jpeg(const std::filesystem::path& path, const Image& image, int quality = 92);
/// Writes a mask with two colours: 0 is black, any other value is white.
void write_gif(const std::filesystem::path& path, const Image& mask);

/// `size` times a scale in (0, 1], rounded, at least one pixel per side. Errors: std::invalid_argument for another scale.
Size scaled(Size size, double scale);

// Errors: std::invalid_argument for an image or a size without pixels.

/// Interpolates when it enlarges. When it shrinks, the filter grows with the step, so that every source pixel counts.
Image resize_bilinear(const Image& image, Size size);
Image resize_nearest(const Image& image, Size size);

}  // namespace gpipe::examples
