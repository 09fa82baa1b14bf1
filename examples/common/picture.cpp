#include "examples/common/picture.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

#include "examples/common/text.h"

namespace gpipe::examples {
namespace {

// In pixels.
constexpr int kSmallestTile = 256;
constexpr int kTitleBar = 36;
constexpr int kTitle = 16;
constexpr int kGap = 4;

constexpr uint8_t kPaper = 48;
constexpr Color kInk{255, 255, 255};

uint8_t to_byte(float value) { return static_cast<uint8_t>(std::lround(std::clamp(value, 0.0f, 1.0f) * 255)); }

void check(const std::vector<Column>& columns) {
  if (columns.empty()) throw std::invalid_argument("a picture needs at least one column");
  const auto& first = columns[0].tiles;
  for (const auto& [title, tiles] : columns) {
    if (tiles.dim() == 4 && tiles.size(1) == 3 && tiles.numel() > 0 && tiles.sizes() == first.sizes()) continue;
    std::ostringstream text;
    text << "a picture takes columns [n, 3, h, w] of equal shape, not " << first.sizes() << " and " << tiles.sizes();
    throw std::invalid_argument(text.str());
  }
}

Image enlarged(const Image& image, int factor) {
  return factor == 1 ? image : resize_nearest(image, {image.width * factor, image.height * factor});
}

}  // namespace

Image to_image(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(at::kCPU, at::kFloat).permute({1, 2, 0}).contiguous();
  Image image({static_cast<int>(values.size(1)), static_cast<int>(values.size(0))}, static_cast<int>(values.size(2)));
  const auto* in = values.const_data_ptr<float>();
  std::transform(in, in + values.numel(), image.pixels.begin(), to_byte);
  return image;
}

Image draw_picture(const std::vector<Column>& columns) {
  check(columns);
  const auto& shape = columns[0].tiles;
  const auto rows = static_cast<int>(shape.size(0));
  const auto longer_side = static_cast<int>(std::max(shape.size(2), shape.size(3)));
  const int factor = (kSmallestTile + longer_side - 1) / longer_side;
  const Size tile{static_cast<int>(shape.size(3)) * factor, static_cast<int>(shape.size(2)) * factor};

  const int width = static_cast<int>(columns.size()) * (tile.width + kGap) - kGap;
  Image picture({width, kTitleBar + rows * (tile.height + kGap) - kGap}, 3);
  std::fill(picture.pixels.begin(), picture.pixels.end(), kPaper);
  int left = 0;
  for (const auto& [title, tiles] : columns) {
    draw_text_centered(picture, left, 0, {tile.width, kTitleBar}, {title, kTitle}, kInk);
    for (int row = 0; row < rows; ++row) {
      const Image image = enlarged(to_image(tiles[row]), factor);
      const int top = kTitleBar + row * (tile.height + kGap);
      for (int y = 0; y < tile.height; ++y) std::copy_n(image.at(0, y), 3 * tile.width, picture.at(left, top + y));
    }
    left += tile.width + kGap;
  }
  return picture;
}

}  // namespace gpipe::examples
