#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "examples/common/image.h"

namespace gpipe::examples {
namespace {

// The source pixels of a line, and their weights, that make up one output pixel.
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
