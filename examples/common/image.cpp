#include "examples/common/image.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>

#include "examples/common/codecs.h"
#include "examples/common/files.h"

namespace gpipe::examples {
namespace {

enum class Format { kJpeg, kPng, kGif };

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, FileCloser>;

std::string last_error() { return std::error_code(errno, std::generic_category()).message(); }

Format detect(std::FILE* file) {
  unsigned char magic[8] = {};
  const size_t length = std::fread(magic, 1, sizeof magic, file);
  if (std::ferror(file)) throw std::runtime_error("cannot be read: " + last_error());
  if (length == 0) throw std::runtime_error("the file is empty");
  std::rewind(file);
  if (std::memcmp(magic, "\xff\xd8\xff", 3) == 0) return Format::kJpeg;
  if (std::memcmp(magic, "\x89PNG\r\n\x1a\n", 8) == 0) return Format::kPng;
  if (std::memcmp(magic, "GIF8", 4) == 0) return Format::kGif;
  throw std::runtime_error("not a JPEG, PNG or GIF file");
}

// Opens the file, tells its format, and puts its name before the reason of any error.
template <class Read>
auto with_file(const std::filesystem::path& path, Read read) {
  try {
    const File file(std::fopen(path.c_str(), "rb"));
    if (!file) throw std::runtime_error("cannot be opened: " + last_error());
    return read(file.get(), detect(file.get()));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path.string() + ": " + error.what());
  }
}

Image decode(const std::filesystem::path& path, std::optional<Size> wanted) {
  return with_file(path, [&](std::FILE* file, Format format) {
    switch (format) {
      case Format::kJpeg:
        return decode_jpeg(file, wanted);
      case Format::kPng:
        return decode_png(file);
      case Format::kGif:
        break;
    }
    return decode_gif(file);
  });
}

// What one output pixel takes from a line of source pixels.
struct Taps {
  int first = 0;
  std::vector<float> weights;
};

std::vector<Taps> triangle_taps(int from, int to) {
  const double step = static_cast<double>(from) / to;
  const double radius = std::max(1.0, step);
  std::vector<Taps> taps(static_cast<size_t>(to));
  for (int i = 0; i < to; ++i) {
    const double center = (i + 0.5) * step;
    const int first = std::max(0, static_cast<int>(std::floor(center - radius)));
    const int end = std::min(from, static_cast<int>(std::ceil(center + radius)));
    auto& tap = taps[static_cast<size_t>(i)];
    tap.first = first;
    double sum = 0;
    for (int source = first; source < end; ++source) {
      const double weight = std::max(0.0, 1.0 - std::abs(source + 0.5 - center) / radius);
      tap.weights.push_back(static_cast<float>(weight));
      sum += weight;
    }
    for (float& weight : tap.weights) weight = static_cast<float>(weight / sum);
  }
  return taps;
}

void check_resize(const Image& image, Size size) {
  if (image.pixels.empty() || size.width < 1 || size.height < 1) {
    throw std::invalid_argument("cannot resize an image of " + to_string(image.size()) + " to " + to_string(size));
  }
}

}  // namespace

std::string to_string(Size size) { return std::to_string(size.width) + "x" + std::to_string(size.height); }

Size to_size(const std::string& text) {
  Size size;
  char rest = 0;
  if (std::sscanf(text.c_str(), "%5dx%5d%c", &size.width, &size.height, &rest) != 2 || size.width < 1 ||
      size.height < 1) {
    throw std::invalid_argument("'" + text + "' is no size; give it as 192x128");
  }
  return size;
}

Image::Image(Size size, int channel_count)
    : width(size.width),
      height(size.height),
      channels(channel_count),
      pixels(static_cast<size_t>(size.width) * static_cast<size_t>(size.height) * static_cast<size_t>(channel_count)) {}

Size image_size(const std::filesystem::path& path) {
  return with_file(path, [](std::FILE* file, Format format) {
    switch (format) {
      case Format::kJpeg:
        return jpeg_size(file);
      case Format::kPng:
        return png_size(file);
      case Format::kGif:
        break;
    }
    return gif_size(file);
  });
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

void write_png(const std::filesystem::path& path, const Image& image) { write_file(path, encode_png(image)); }

void write_jpeg(const std::filesystem::path& path, const Image& image, int quality) {
  write_file(path, encode_jpeg(image, quality));
}

void write_gif(const std::filesystem::path& path, const Image& mask) { write_file(path, encode_gif(mask)); }

Size scaled(Size size, double scale) {
  if (!(scale > 0 && scale <= 1)) {
    throw std::invalid_argument("scale is " + std::to_string(scale) + "; it must be above 0 and at most 1");
  }
  const auto side = [scale](int pixels) { return std::max(1, static_cast<int>(std::lround(pixels * scale))); };
  return {side(size.width), side(size.height)};
}

Image resize_bilinear(const Image& image, Size size) {
  check_resize(image, size);
  const auto columns = triangle_taps(image.width, size.width);
  const auto rows = triangle_taps(image.height, size.height);
  const size_t channels = static_cast<size_t>(image.channels);
  const size_t stride = static_cast<size_t>(size.width) * channels;

  std::vector<float> narrowed(static_cast<size_t>(image.height) * stride);
  for (int y = 0; y < image.height; ++y) {
    float* out = narrowed.data() + static_cast<size_t>(y) * stride;
    for (const auto& [first, weights] : columns) {
      for (size_t c = 0; c < channels; ++c) {
        const uint8_t* in = image.at(first, y) + c;
        float sum = 0;
        for (size_t k = 0; k < weights.size(); ++k) sum += weights[k] * static_cast<float>(in[k * channels]);
        *out++ = sum;
      }
    }
  }

  Image result(size, image.channels);
  std::vector<float> line(stride);
  for (int y = 0; y < size.height; ++y) {
    const auto& [first, weights] = rows[static_cast<size_t>(y)];
    std::fill(line.begin(), line.end(), 0.5f);  // rounds to nearest
    for (size_t k = 0; k < weights.size(); ++k) {
      const float* in = narrowed.data() + (static_cast<size_t>(first) + k) * stride;
      for (size_t i = 0; i < stride; ++i) line[i] += weights[k] * in[i];
    }
    std::transform(line.begin(), line.end(), result.at(0, y),
                   [](float value) { return static_cast<uint8_t>(std::clamp(value, 0.0f, 255.0f)); });
  }
  return result;
}

Image resize_nearest(const Image& image, Size size) {
  check_resize(image, size);
  const auto nearest = [](int i, int from, int to) { return static_cast<int>((2 * int64_t{i} + 1) * from / (2 * to)); };
  Image result(size, image.channels);
  for (int y = 0; y < size.height; ++y) {
    const int source_y = nearest(y, image.height, size.height);
    for (int x = 0; x < size.width; ++x) {
      std::copy_n(image.at(nearest(x, image.width, size.width), source_y), image.channels, result.at(x, y));
    }
  }
  return result;
}

}  // namespace gpipe::examples
