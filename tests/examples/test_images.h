#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "examples/common/image.h"

namespace gpipe::examples {

// A smooth image, which JPEG keeps well.
inline Image gradient(Size size) {
  Image image(size, 3);
  for (int y = 0; y < size.height; ++y) {
    for (int x = 0; x < size.width; ++x) {
      uint8_t* pixel = image.at(x, y);
      pixel[0] = static_cast<uint8_t>(255 * x / size.width);
      pixel[1] = static_cast<uint8_t>(255 * y / size.height);
      pixel[2] = 128;
    }
  }
  return image;
}

inline Image checkers(Size size) {
  Image mask(size, 1);
  for (int y = 0; y < size.height; ++y) {
    for (int x = 0; x < size.width; ++x) *mask.at(x, y) = (x / 3 + y / 2) % 2;
  }
  return mask;
}

// GIF files, built by hand.

// Little-endian.
inline std::string word(int value) {
  return {static_cast<char>(static_cast<unsigned char>(value)), static_cast<char>(value >> 8)};
}

// Pixel data with codes of three bits: 0 to 3 are colours, 4 clears the table, 5 ends. REQUIRES: fewer than four codes
// follow a 4, because codes would become longer.
inline std::string lzw(const std::vector<int>& codes) {
  uint64_t bits = 0;
  for (size_t i = 0; i < codes.size(); ++i) bits |= static_cast<uint64_t>(codes[i]) << (3 * i);
  std::string data;
  for (; bits != 0; bits >>= 8) data += static_cast<char>(bits);
  return "\x02" + std::string(1, static_cast<char>(data.size())) + data + '\0';
}

struct Frame {
  int left = 1;
  int top = 2;
  int width = 2;
  int height = 1;
  char flags = 0;  // of the image descriptor: 0x40 interlaced, 0x80 with a local palette of two
  std::string palette = {};
  std::string data = lzw({4, 1, 1, 5});
};

inline std::string to_gif(const Frame& frame) {
  return "," + word(frame.left) + word(frame.top) + word(frame.width) + word(frame.height) + frame.flags +
         frame.palette + frame.data;
}

inline const std::string kBlackAndWhite = std::string("\0\0\0\xff\xff\xff", 6);

inline std::string gif_header(Size canvas) {
  return "GIF89a" + word(canvas.width) + word(canvas.height) + std::string("\x80\0\0", 3) + kBlackAndWhite;
}

}  // namespace gpipe::examples
