#include "examples/common/image.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include "examples/common/codecs.h"
#include "examples/common/files.h"

namespace gpipe::examples {
namespace {

constexpr int kLargestSide = 65535;
constexpr int kLargestJpegSide = 65500;
constexpr uint64_t kMostPixels = uint64_t{1} << 28;
// Read from a file of any length, because the header can be longer than the pixels.
constexpr uint64_t kFewPixels = uint64_t{1} << 20;

struct Format {
  std::string_view magic;
  Size (*size)(std::FILE* file);
  Image (*decode)(std::FILE* file, std::optional<Size> wanted);
  // No encoder fits more into a byte.
  uint64_t pixels_per_byte;
};

constexpr Format kFormats[] = {
    // At least one bit per block of 64 pixels.
    {"\xff\xd8\xff", jpeg_size, decode_jpeg, 8 * 64},
    // deflate expands a byte to at most 1032 bytes of 8 pixels each.
    {"\x89PNG\r\n\x1a\n", png_size, [](std::FILE* file, std::optional<Size>) { return decode_png(file); }, 8 * 1032},
    // At least 12 bits per string of fewer than 4096 pixels.
    {"GIF8", gif_size, [](std::FILE* file, std::optional<Size>) { return decode_gif(file); }, 8 * 4096 / 12},
};

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, FileCloser>;

std::string last_error() { return std::error_code(errno, std::generic_category()).message(); }

const Format& detect(std::FILE* file) {
  char magic[8] = {};
  const size_t length = std::fread(magic, 1, sizeof magic, file);
  if (std::ferror(file)) throw std::runtime_error("cannot be read: " + last_error());
  if (length == 0) throw std::runtime_error("the file is empty");
  std::rewind(file);
  for (const auto& format : kFormats) {
    if (std::string_view(magic, length).starts_with(format.magic)) return format;
  }
  throw std::runtime_error("not a JPEG, PNG or GIF file");
}

// Reads the header and returns to the start of the file.
Size read_size(std::FILE* file, const Format& format, uint64_t bytes) {
  const Size size = format.size(file);
  std::rewind(file);
  const auto pixels = static_cast<uint64_t>(size.width) * static_cast<uint64_t>(size.height);
  if (size.width > kLargestSide || size.height > kLargestSide || pixels > kMostPixels) {
    throw std::runtime_error(to_string(size) + " pixels are too many; at most " + std::to_string(kLargestSide) +
                             " per side and " + std::to_string(kMostPixels) + " in all are supported");
  }
  if (pixels > std::max(kFewPixels, bytes * format.pixels_per_byte)) {
    throw std::runtime_error("damaged: " + to_string(size) + " pixels do not fit into " + std::to_string(bytes) +
                             " bytes");
  }
  return size;
}

// Puts the name of the file before the message of any error.
template <class Call>
auto with_name(const std::filesystem::path& path, Call call) {
  try {
    return call();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path.string() + ": " + error.what());
  }
}

// `read` gets the open file, its format, and its size in pixels, which has been checked.
template <class Read>
auto with_file(const std::filesystem::path& path, Read read) {
  return with_name(path, [&] {
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);
    if (error) throw std::runtime_error("cannot be opened: " + error.message());
    const File file(std::fopen(path.c_str(), "rb"));
    if (!file) throw std::runtime_error("cannot be opened: " + last_error());
    const Format& format = detect(file.get());
    return read(file.get(), format, read_size(file.get(), format, bytes));
  });
}

Image decode(const std::filesystem::path& path, std::optional<Size> wanted) {
  return with_file(path, [&](std::FILE* file, const Format& format, Size) { return format.decode(file, wanted); });
}

size_t byte_count(Size size, int channels) {
  return static_cast<size_t>(size.width) * static_cast<size_t>(size.height) * static_cast<size_t>(channels);
}

template <class Encode>
void write(const std::filesystem::path& path, const Image& image, std::initializer_list<int> channels, int largest_side,
           Encode encode) {
  const auto fits = [=](int side) { return side >= 1 && side <= largest_side; };
  if (!fits(image.width) || !fits(image.height) ||
      std::find(channels.begin(), channels.end(), image.channels) == channels.end() ||
      image.pixels.size() != byte_count(image.size(), image.channels)) {
    throw std::invalid_argument(path.string() + ": cannot write " + std::to_string(image.pixels.size()) +
                                " bytes as an image of " + to_string(image.size()) + " with " +
                                std::to_string(image.channels) + " channels; at most " + std::to_string(largest_side) +
                                " pixels per side");
  }
  write_file(path, with_name(path, [&] { return encode(image); }));
}

}  // namespace

std::string to_string(Size size) { return std::to_string(size.width) + "x" + std::to_string(size.height); }

Size to_size(const std::string& text) {
  Size size;
  char rest = 0;
  if (std::sscanf(text.c_str(), "%5dx%5d%c", &size.width, &size.height, &rest) != 2 || size.width < 1 ||
      size.height < 1) {
    throw std::invalid_argument("'" + text + "' is not a size such as 192x128");
  }
  return size;
}

Image::Image(Size size, int channel_count)
    : width(size.width), height(size.height), channels(channel_count), pixels(byte_count(size, channel_count)) {}

Size image_size(const std::filesystem::path& path) {
  return with_file(path, [](std::FILE*, const Format&, Size size) { return size; });
}

Image read_image(const std::filesystem::path& path) { return decode(path, std::nullopt); }

Image read_image(const std::filesystem::path& path, Size wanted) {
  Image image = decode(path, wanted);
  return image.size() == wanted ? image : resize_bilinear(image, wanted);
}

Image read_mask(const std::filesystem::path& path) {
  const Image image = decode(path, std::nullopt);
  Image mask(image.size(), 1);
  const uint8_t* rgb = image.pixels.data();
  for (uint8_t& value : mask.pixels) {
    value = static_cast<uint8_t>((299 * rgb[0] + 587 * rgb[1] + 114 * rgb[2]) / 1000);
    rgb += 3;
  }
  const uint8_t brightest = mask.pixels.empty() ? 0 : *std::max_element(mask.pixels.begin(), mask.pixels.end());
  for (uint8_t& value : mask.pixels) value = brightest <= 1 ? value : value > 127;
  return mask;
}

Image read_mask(const std::filesystem::path& path, Size wanted) {
  Image mask = read_mask(path);
  return mask.size() == wanted ? mask : resize_nearest(mask, wanted);
}

void write_png(const std::filesystem::path& path, const Image& image) {
  write(path, image, {1, 3}, kLargestSide, encode_png);
}

void write_jpeg(const std::filesystem::path& path, const Image& image, int quality) {
  write(path, image, {1, 3}, kLargestJpegSide, [&](const Image& whole) { return encode_jpeg(whole, quality); });
}

void write_gif(const std::filesystem::path& path, const Image& mask) {
  write(path, mask, {1}, kLargestSide, encode_gif);
}

}  // namespace gpipe::examples
