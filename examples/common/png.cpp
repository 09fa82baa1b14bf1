#include <png.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "examples/common/codecs.h"

namespace gpipe::examples {
namespace {

// libpng's simplified interface. A call that fails returns 0 and leaves a message.
class Png {
 public:
  Png() { png_.version = PNG_IMAGE_VERSION; }
  ~Png() { png_image_free(&png_); }
  Png(const Png&) = delete;
  Png& operator=(const Png&) = delete;

  png_image* get() { return &png_; }
  void check(int result) const {
    if (result == 0) throw std::runtime_error(png_.message);
  }

 private:
  png_image png_{};
};

void read_header(Png& png, std::FILE* file) { png.check(png_image_begin_read_from_stdio(png.get(), file)); }

Size size_of(Png& png) { return {static_cast<int>(png.get()->width), static_cast<int>(png.get()->height)}; }

}  // namespace

Size png_size(std::FILE* file) {
  Png png;
  read_header(png, file);
  return size_of(png);
}

Image decode_png(std::FILE* file) {
  Png png;
  read_header(png, file);
  Image image(size_of(png), 3);
  if ((png.get()->format & PNG_FORMAT_FLAG_ALPHA) == 0) {
    png.get()->format = PNG_FORMAT_RGB;
    png.check(png_image_finish_read(png.get(), nullptr, image.pixels.data(), 0, nullptr));
    return image;
  }
  // Read as RGB, libpng would blend the pixels with a background.
  png.get()->format = PNG_FORMAT_RGBA;
  std::vector<uint8_t> rgba(image.pixels.size() / 3 * 4);
  png.check(png_image_finish_read(png.get(), nullptr, rgba.data(), 0, nullptr));
  for (size_t i = 0; i < rgba.size() / 4; ++i) std::copy_n(&rgba[4 * i], 3, &image.pixels[3 * i]);
  return image;
}

std::vector<uint8_t> encode_png(const Image& image) {
  Png png;
  png.get()->width = static_cast<png_uint_32>(image.width);
  png.get()->height = static_cast<png_uint_32>(image.height);
  png.get()->format = image.channels == 1 ? PNG_FORMAT_GRAY : PNG_FORMAT_RGB;
  png_alloc_size_t length = PNG_IMAGE_PNG_SIZE_MAX(*png.get());
  std::vector<uint8_t> bytes(length);
  png.check(png_image_write_to_memory(png.get(), bytes.data(), &length, 0, image.pixels.data(), 0, nullptr));
  bytes.resize(length);
  return bytes;
}

}  // namespace gpipe::examples
