#include "examples/common/picture.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

namespace gpipe::examples {
namespace {

constexpr int kSeparator = 2;
constexpr uint8_t kSeparatorGrey = 96;

uint8_t to_byte(float value) { return static_cast<uint8_t>(std::lround(std::clamp(value, 0.0f, 1.0f) * 255)); }

void check(const std::vector<at::Tensor>& columns) {
  for (const auto& column : columns) {
    if (column.dim() == 4 && column.size(1) == 3 && column.numel() > 0 && column.sizes() == columns[0].sizes())
      continue;
    std::ostringstream text;
    text << "a picture takes columns [n, 3, h, w] of equal shape, not " << columns[0].sizes() << " and "
         << column.sizes();
    throw std::invalid_argument(text.str());
  }
}

}  // namespace

Image to_image(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(at::kCPU, at::kFloat).permute({1, 2, 0}).contiguous();
  Image image({static_cast<int>(values.size(1)), static_cast<int>(values.size(0))}, static_cast<int>(values.size(2)));
  const auto* in = values.const_data_ptr<float>();
  std::transform(in, in + values.numel(), image.pixels.begin(), to_byte);
  return image;
}

Image draw_picture(const std::vector<at::Tensor>& columns) {
  if (columns.empty()) throw std::invalid_argument("a picture needs a column");
  check(columns);
  const auto rows = static_cast<int>(columns[0].size(0));
  const auto height = static_cast<int>(columns[0].size(2));
  const auto width = static_cast<int>(columns[0].size(3));
  const int row_step = height + kSeparator;
  const int column_step = width + kSeparator;

  Image picture({static_cast<int>(columns.size()) * column_step - kSeparator, rows * row_step - kSeparator}, 3);
  std::fill(picture.pixels.begin(), picture.pixels.end(), kSeparatorGrey);
  for (int row = 0; row < rows; ++row) {
    for (size_t column = 0; column < columns.size(); ++column) {
      const Image panel = to_image(columns[column][row]);
      for (int y = 0; y < height; ++y) {
        std::copy_n(panel.at(0, y), 3 * width, picture.at(static_cast<int>(column) * column_step, row * row_step + y));
      }
    }
  }
  return picture;
}

}  // namespace gpipe::examples
