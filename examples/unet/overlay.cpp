#include "examples/unet/overlay.h"

#include <algorithm>
#include <array>

#include "examples/unet/classes.h"

namespace gpipe::examples::unet {
namespace {

constexpr int kTint = 35;        // percent
constexpr int kLineShare = 300;  // pixels of the longer side per pixel of a line
constexpr Color kLight{255, 255, 255};
constexpr Color kDark{0, 0, 0};

void set(Image& image, int x, int y, Color color) {
  uint8_t* rgb = image.at(x, y);
  rgb[0] = static_cast<uint8_t>(color.red);
  rgb[1] = static_cast<uint8_t>(color.green);
  rgb[2] = static_cast<uint8_t>(color.blue);
}

void tint(Image& image, const Image& labels, int classes) {
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      const Label label = *labels.at(x, y);
      if (label == 0) continue;
      const uint8_t* rgb = image.at(x, y);
      const Color color = classes == 2 ? Color{255, 0, 0} : class_color(label);
      set(image, x, y, mix({rgb[0], rgb[1], rgb[2]}, color, kTint));
    }
  }
}

// Draws both lines around a place where `inside` meets `outside`.
void outline_at(Image& image, const Image& labels, int x, int y, int width, Label inside, Label outside) {
  for (int near_y = std::max(0, y - width); near_y <= std::min(image.height - 1, y + width); ++near_y) {
    for (int near_x = std::max(0, x - width); near_x <= std::min(image.width - 1, x + width); ++near_x) {
      const Label label = *labels.at(near_x, near_y);
      if (label == inside) set(image, near_x, near_y, kLight);
      if (label == outside) set(image, near_x, near_y, kDark);
    }
  }
}

}  // namespace

Image overlay(Image image, const Image& labels, int classes) {
  tint(image, labels, classes);
  const int width = std::max(image.width, image.height) / kLineShare;
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      const Label label = *labels.at(x, y);
      for (const auto& [right, down] : std::array<std::array<int, 2>, 4>{{{1, 0}, {-1, 0}, {0, 1}, {0, -1}}}) {
        if (x + right < 0 || x + right >= image.width || y + down < 0 || y + down >= image.height) continue;
        const Label other = *labels.at(x + right, y + down);
        if (other < label) outline_at(image, labels, x, y, std::max(1, width), label, other);
      }
    }
  }
  return image;
}

}  // namespace gpipe::examples::unet
