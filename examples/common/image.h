#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace gpipe::examples {

/// In pixels.
struct Size {
  int width = 0;
  int height = 0;

  bool operator==(const Size&) const = default;
};
/// "192x128"
std::string to_string(Size size);
/// The opposite. Throws std::invalid_argument for other text.
Size to_size(const std::string& text);

/// Rows from the top, pixels from the left, channels of a pixel side by side. Three channels are red, green, blue
/// (sRGB); one channel is grey, or a mask of 0 and 1.
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

/// All functions that read files tell JPEG, PNG and GIF apart by content, not by name. They throw std::runtime_error
/// that names the file and the reason for a file that is missing, of another kind, damaged or cut short. They refuse
/// more than 65535 pixels a side or 2^28 in all. They also refuse more than 2^20 pixels where the file is too short for
/// them: 512 pixels a byte of a JPEG, 8256 of a PNG, 2730 of a GIF. No encoder exceeds that, except with JPEG's
/// arithmetic coding.

/// Reads no more than the header.
Size image_size(const std::filesystem::path& path);

/// Three channels, whole size. Of a GIF, the first frame; what it does not cover is black.
Image read_image(const std::filesystem::path& path);
/// Resized to `wanted`; a JPEG is decoded no larger than needed for it, which is faster.
Image read_image(const std::filesystem::path& path, Size wanted);

/// One channel: 1 where the luminance is above 127, else 0; in a file that knows but 0 and 1, as it is.
Image read_mask(const std::filesystem::path& path);
/// Resized to `wanted` by the nearest pixel, so that it stays 0 and 1.
Image read_mask(const std::filesystem::path& path, Size wanted);

/// Throw std::runtime_error that names the path where it cannot be written, and std::invalid_argument for an image that
/// the format cannot hold. PNG and JPEG take one or three channels.
void write_png(const std::filesystem::path& path, const Image& image);
void write_jpeg(const std::filesystem::path& path, const Image& image, int quality = 92);
/// A mask as a palette of two: 0 is black, all else white.
void write_gif(const std::filesystem::path& path, const Image& mask);

/// `size` times a scale in (0, 1], rounded, at least one pixel a side.
Size scaled(Size size, double scale);

/// Bilinear where it enlarges; where it shrinks, the triangle grows with it so that every source pixel counts.
Image resize_bilinear(const Image& image, Size size);
Image resize_nearest(const Image& image, Size size);

}  // namespace gpipe::examples
