#include "examples/unet/classes.h"

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>
#include <string>

namespace gpipe::examples::unet {
namespace {

using Rgb = std::array<uint8_t, 3>;

Rgb rgb_of(Label label) {
  const Color color = class_color(label);
  return {static_cast<uint8_t>(color.red), static_cast<uint8_t>(color.green), static_cast<uint8_t>(color.blue)};
}

std::map<Rgb, Label> labels_by_color(int classes) {
  std::map<Rgb, Label> labels;
  for (int k = 0; k < classes; ++k) {
    const auto grey = static_cast<uint8_t>(k);
    labels.emplace(Rgb{grey, grey, grey}, static_cast<Label>(k));
    labels.emplace(rgb_of(static_cast<Label>(k)), static_cast<Label>(k));
  }
  return labels;
}

}  // namespace

// Each three bits of the class, from the lowest, give the next lower bit of red, green and blue.
Color class_color(Label label) {
  Color color;
  for (int bit = 7, rest = label; rest > 0; --bit, rest >>= 3) {
    color.red |= (rest & 1) << bit;
    color.green |= ((rest >> 1) & 1) << bit;
    color.blue |= ((rest >> 2) & 1) << bit;
  }
  return color;
}

Image read_labels(const std::filesystem::path& path, int classes) {
  if (classes == 2) return read_mask(path);
  const auto by_color = labels_by_color(classes);
  const Image image = read_image(path);
  Image labels(image.size(), 1);
  auto last = by_color.begin();  // neighbours mostly have the same class
  for (size_t i = 0; i < labels.pixels.size(); ++i) {
    const Rgb rgb = {image.pixels[3 * i], image.pixels[3 * i + 1], image.pixels[3 * i + 2]};
    if (rgb != last->first) {
      const auto found = by_color.find(rgb);
      if (found == by_color.end()) {
        throw std::runtime_error(path.string() + ": the colour " + std::to_string(rgb[0]) + "," +
                                 std::to_string(rgb[1]) + "," + std::to_string(rgb[2]) + " is not that of any of " +
                                 std::to_string(classes) + " classes");
      }
      last = found;
    }
    labels.pixels[i] = last->second;
  }
  return labels;
}

Image read_labels(const std::filesystem::path& path, int classes, Size wanted) {
  Image labels = read_labels(path, classes);
  return labels.size() == wanted ? labels : resize_nearest(labels, wanted);
}

Image paint_labels(const Image& labels, int classes) {
  Image picture(labels.size(), classes == 2 ? 1 : 3);
  for (size_t i = 0; i < labels.pixels.size(); ++i) {
    if (classes == 2) {
      picture.pixels[i] = labels.pixels[i] == 0 ? 0 : 255;
    } else {
      const Rgb rgb = rgb_of(labels.pixels[i]);
      std::copy(rgb.begin(), rgb.end(), picture.pixels.begin() + static_cast<std::ptrdiff_t>(3 * i));
    }
  }
  return picture;
}

}  // namespace gpipe::examples::unet
