#include <gif_lib.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

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
  throw std::runtime_error(text != nullptr ? text : "the GIF is damaged or cut short");
}

void check(int result, const GifFileType* gif) {
  if (result != GIF_OK) fail(gif->Error);
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

GifRecordType next_record(GifFileType* gif) {
  GifRecordType type = UNDEFINED_RECORD_TYPE;
  check(DGifGetRecordType(gif, &type), gif);
  return type;
}

void skip_extension(GifFileType* gif) {
  int code = 0;
  GifByteType* block = nullptr;
  check(DGifGetExtension(gif, &code, &block), gif);
  while (block != nullptr) check(DGifGetExtensionNext(gif, &block), gif);
}

void skip_pixels(GifFileType* gif) {
  GifByteType* block = nullptr;
  do {
    check(DGifGetCodeNext(gif, &block), gif);
  } while (block != nullptr);
}

// The rows in the order of the file.
std::vector<int> row_order(const GifImageDesc& frame) {
  std::vector<int> rows;
  const auto pass = [&](int first, int step) {
    for (int y = first; y < frame.Height; y += step) rows.push_back(y);
  };
  if (frame.Interlace) {
    pass(0, 8);
    pass(4, 8);
    pass(2, 4);
    pass(1, 2);
  } else {
    pass(0, 1);
  }
  return rows;
}

// Decodes the frame whose header was read. Parts outside the image are left out.
void draw_frame(GifFileType* gif, Image& image) {
  const GifImageDesc& frame = gif->Image;
  const ColorMapObject* palette = frame.ColorMap != nullptr ? frame.ColorMap : gif->SColorMap;
  if (palette == nullptr) throw std::runtime_error("the GIF has no palette");
  if (frame.Width < 1 || frame.Height < 1) throw std::runtime_error("the GIF's first frame has no pixels");
  const int width = std::min(frame.Width, image.width - frame.Left);
  std::vector<GifPixelType> row(static_cast<size_t>(frame.Width));
  for (const int y : row_order(frame)) {
    check(DGifGetLine(gif, row.data(), frame.Width), gif);
    if (frame.Top + y >= image.height) continue;
    for (int x = 0; x < width; ++x) {
      const int index = row[static_cast<size_t>(x)];
      if (index >= palette->ColorCount) throw std::runtime_error("the GIF uses a colour that its palette lacks");
      const GifColorType& color = palette->Colors[index];
      uint8_t* pixel = image.at(frame.Left + x, frame.Top + y);
      pixel[0] = color.Red;
      pixel[1] = color.Green;
      pixel[2] = color.Blue;
    }
  }
}

// Receives an encoder's bytes. giflib's C code calls write(), so it does not throw.
struct Sink {
  static int write(GifFileType* gif, const GifByteType* data, int count) {
    auto* sink = static_cast<Sink*>(gif->UserData);
    try {
      if (!sink->full) sink->bytes.insert(sink->bytes.end(), data, data + count);
    } catch (const std::exception&) {
      sink->full = true;
    }
    return sink->full ? 0 : count;
  }

  std::vector<uint8_t> bytes;
  bool full = false;
};

}  // namespace

Size gif_size(std::FILE* file) {
  const Decoder gif = open(file);
  return {gif->SWidth, gif->SHeight};
}

Image decode_gif(std::FILE* file) {
  const Decoder gif = open(file);
  Image image({gif->SWidth, gif->SHeight}, 3);
  for (auto type = next_record(gif.get()); type != TERMINATE_RECORD_TYPE; type = next_record(gif.get())) {
    if (type == EXTENSION_RECORD_TYPE) {
      skip_extension(gif.get());
      continue;
    }
    check(DGifGetImageDesc(gif.get()), gif.get());
    if (gif->ImageCount == 1) {
      draw_frame(gif.get(), image);
    } else {
      skip_pixels(gif.get());
    }
  }
  if (gif->ImageCount == 0) throw std::runtime_error("the GIF has no frame");
  return image;
}

std::vector<uint8_t> encode_gif(const Image& mask) {
  Sink sink;
  int error = 0;
  Encoder gif(EGifOpen(&sink, Sink::write, &error));
  if (!gif) fail(error);
  const GifColorType black_and_white[] = {{0, 0, 0}, {255, 255, 255}};
  const Palette palette(GifMakeMapObject(2, black_and_white));
  if (!palette) fail(E_GIF_ERR_NOT_ENOUGH_MEM);

  check(EGifPutScreenDesc(gif.get(), mask.width, mask.height, 1, 0, palette.get()), gif.get());
  check(EGifPutImageDesc(gif.get(), 0, 0, mask.width, mask.height, false, nullptr), gif.get());
  std::vector<GifPixelType> row(static_cast<size_t>(mask.width));
  for (int y = 0; y < mask.height; ++y) {
    std::transform(mask.at(0, y), mask.at(0, y) + mask.width, row.begin(), [](uint8_t value) { return value != 0; });
    check(EGifPutLine(gif.get(), row.data(), mask.width), gif.get());
  }
  if (EGifCloseFile(gif.release(), &error) != GIF_OK) fail(error);
  if (sink.full) fail(E_GIF_ERR_NOT_ENOUGH_MEM);
  return std::move(sink.bytes);
}

}  // namespace gpipe::examples
