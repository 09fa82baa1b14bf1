#include "examples/unet/augment.h"

#include <algorithm>
#include <array>

namespace gpipe::examples::unet {
namespace {

constexpr int kShift = 8;        // the largest shift is 1/8 of a side
constexpr int kContrast = 20;    // percent, around middle grey
constexpr int kBrightness = 25;  // of 255
constexpr int kTint = 10;        // percent, per channel

Image moved(const Image& image, bool mirror, int shift_x, int shift_y) {
  Image result(image.size(), image.channels);
  for (int y = 0; y < image.height; ++y) {
    const int from_y = std::clamp(y - shift_y, 0, image.height - 1);
    for (int x = 0; x < image.width; ++x) {
      const int from_x = std::clamp(x - shift_x, 0, image.width - 1);
      std::copy_n(image.at(mirror ? image.width - 1 - from_x : from_x, from_y), image.channels, result.at(x, y));
    }
  }
  return result;
}

void recolor(Image& image, Random& random) {
  const int contrast = random.between(100 - kContrast, 100 + kContrast);
  const int brightness = random.between(-kBrightness, kBrightness);
  for (int channel = 0; channel < image.channels; ++channel) {
    const int tint = random.between(100 - kTint, 100 + kTint);
    std::array<uint8_t, 256> table;
    for (int value = 0; value < 256; ++value) {
      const int changed = ((value - 128) * contrast / 100 + 128 + brightness) * tint / 100;
      table[static_cast<size_t>(value)] = static_cast<uint8_t>(std::clamp(changed, 0, 255));
    }
    for (size_t i = static_cast<size_t>(channel); i < image.pixels.size(); i += static_cast<size_t>(image.channels)) {
      image.pixels[i] = table[image.pixels[i]];
    }
  }
}

}  // namespace

void augment(Image& image, Image& mask, Random& random) {
  const bool mirror = random.chance(50);
  const int shift_x = random.between(-image.width / kShift, image.width / kShift);
  const int shift_y = random.between(-image.height / kShift, image.height / kShift);
  image = moved(image, mirror, shift_x, shift_y);
  mask = moved(mask, mirror, shift_x, shift_y);
  recolor(image, random);
}

}  // namespace gpipe::examples::unet
