#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <vector>

#include "examples/common/image.h"

/// One source file per format, behind image.h. Files are open and at their start. Decoded images have three channels.
/// Errors are std::runtime_error with the reason only: the caller adds the name.
///
/// REQUIRES: The caller has bounded the size before it decodes, and has checked an image before it encodes.
namespace gpipe::examples {

Size jpeg_size(std::FILE* file);
/// Decodes at the smallest n/8 of the whole size that is not below `wanted`; at whole size without one.
Image decode_jpeg(std::FILE* file, std::optional<Size> wanted);
std::vector<uint8_t> encode_jpeg(const Image& image, int quality);

Size png_size(std::FILE* file);
/// Transparent pixels come out over black.
Image decode_png(std::FILE* file);
std::vector<uint8_t> encode_png(const Image& image);

Size gif_size(std::FILE* file);
/// What the first frame does not cover is black. Transparent pixels have the colour of the palette.
Image decode_gif(std::FILE* file);
std::vector<uint8_t> encode_gif(const Image& mask);

}  // namespace gpipe::examples
