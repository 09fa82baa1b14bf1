#include <gif_lib.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include "examples/common/codecs.h"

namespace gpipe::examples {
namespace {

struct DecoderCloser {
  void operator()(GifFileType* gif) const { DGifCloseFile(gif, nullptr); }
};
struct EncoderCloser {
  void operator()(GifFileType* gif) const { EGifCloseFile(gif, nullptr); }
};
struct PaletteFreer {
  void operator()(ColorMapObject* palette) const { GifFreeMapObject(palette); }
};
using Decoder = std::unique_ptr<GifFileType, DecoderCloser>;
using Encoder = std::unique_ptr<GifFileType, EncoderCloser>;
using Palette = std::unique_ptr<ColorMapObject, PaletteFreer>;

[[noreturn]] void fail(int code) {
  const char* text = GifErrorString(code);
  throw std::runtime_error(text != nullptr ? text : "GIF error " + std::to_string(code));
}

Decoder open(std::FILE* file) {
  int error = 0;
  const auto read = [](GifFileType* gif, GifByteType* bytes, int count) {
    return static_cast<int>(std::fread(bytes, 1, static_cast<size_t>(count), static_cast<std::FILE*>(gif->UserData)));
  };
  Decoder gif(DGifOpen(file, read, &error));
  if (!gif) fail(error);
  if (gif->SWidth < 1 || gif->SHeight < 1) throw std::runtime_error("the GIF has no pixels");
  return gif;
}

}  // namespace

Size gif_size(std::FILE* file) {
  const Decoder gif = open(file);
  return {gif->SWidth, gif->SHeight};
}

Image decode_gif(std::FILE* file) {
  const Decoder gif = open(file);
  if (DGifSlurp(gif.get()) != GIF_OK) fail(gif->Error);
  const SavedImage& frame = gif->SavedImages[0];
  const GifImageDesc& place = frame.ImageDesc;
  const ColorMapObject* palette = place.ColorMap != nullptr ? place.ColorMap : gif->SColorMap;
  if (palette == nullptr) throw std::runtime_error("the GIF has no palette");

  Image image({gif->SWidth, gif->SHeight}, 3);
  for (int y = 0; y < std::min(place.Height, image.height - place.Top); ++y) {
    for (int x = 0; x < std::min(place.Width, image.width - place.Left); ++x) {
      const int index = frame.RasterBits[static_cast<size_t>(y) * place.Width + x];
      if (index >= palette->ColorCount) throw std::runtime_error("the GIF uses a colour that its palette lacks");
      const GifColorType& color = palette->Colors[index];
      uint8_t* pixel = image.at(place.Left + x, place.Top + y);
      pixel[0] = color.Red;
      pixel[1] = color.Green;
      pixel[2] = color.Blue;
    }
  }
  return image;
}

std::vector<uint8_t> encode_gif(const Image& mask) {
  std::vector<uint8_t> bytes;
  int error = 0;
  const auto write = [](GifFileType* gif, const GifByteType* data, int count) {
    auto* out = static_cast<std::vector<uint8_t>*>(gif->UserData);
    out->insert(out->end(), data, data + count);
    return count;
  };
  Encoder gif(EGifOpen(&bytes, write, &error));
  if (!gif) fail(error);
  const GifColorType black_and_white[] = {{0, 0, 0}, {255, 255, 255}};
  const Palette palette(GifMakeMapObject(2, black_and_white));
  if (!palette) fail(E_GIF_ERR_NOT_ENOUGH_MEM);

  const auto check = [&](int result) {
    if (result != GIF_OK) fail(gif->Error);
  };
  check(EGifPutScreenDesc(gif.get(), mask.width, mask.height, 1, 0, palette.get()));
  check(EGifPutImageDesc(gif.get(), 0, 0, mask.width, mask.height, false, nullptr));
  std::vector<GifPixelType> row(static_cast<size_t>(mask.width));
  for (int y = 0; y < mask.height; ++y) {
    std::transform(mask.at(0, y), mask.at(0, y) + mask.width, row.begin(), [](uint8_t value) { return value != 0; });
    check(EGifPutLine(gif.get(), row.data(), mask.width));
  }
  if (EGifCloseFile(gif.release(), &error) != GIF_OK) fail(error);
  return bytes;
}

}  // namespace gpipe::examples
