#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <vector>

#include "examples/common/image.h"

/// One source file per format, used by image.cpp. Files are open and at their start. Decoded images have three channels.
/// Errors: std::runtime_error with the reason alone; the caller adds the file's name.
///
/// REQUIRES: the caller has checked the size before decoding, and the image before encoding.
namespace gpipe::examples {

Size jpeg_size(std::FILE* file);
/// Decodes at the smallest n/8 of the full size that is not below `wanted`, or at full size if `wanted` is empty.
Image decode_jpeg(std::FILE* file, std::optional<Size> wanted);
std::vector<uint8_t> encode_jpeg(const Image& image, int quality);

Size png_size(std::FILE* file);
/// Drops the alpha channel: transparent pixels keep the colour that the file gives them.
Image decode_png(std::FILE* file);
std::vector<uint8_t> encode_png(const Image& image);

Size gif_size(std::FILE* file);
/// Pixels outside the first frame are black. Transparent pixels keep the colour of the palette.
Image decode_gif(std::FILE* file);
std::vector<uint8_t> encode_gif(const Image& mask);

}  // namespace gpipe::examples
