#include "examples/common/picture.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

#include "examples/common/image.h"

namespace gpipe::examples {
namespace {

constexpr int kSeparator = 2;
constexpr uint8_t kSeparatorGrey = 96;

uint8_t to_byte(float value) { return static_cast<uint8_t>(std::lround(std::clamp(value, 0.0f, 1.0f) * 255)); }

// One panel: `tensor` is [1 or 3, h, w].
void paste(const at::Tensor& tensor, int left, int top, Image& picture) {
  const at::Tensor values = tensor.detach().to(at::kCPU, at::kFloat).contiguous();
  const auto* in = values.const_data_ptr<float>();
  const auto channels = static_cast<int>(values.size(0));
  const auto height = static_cast<int>(values.size(1));
  const auto width = static_cast<int>(values.size(2));
  for (int channel = 0; channel < channels; ++channel) {
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        uint8_t* pixel = picture.at(left + x, top + y);
        const uint8_t value = to_byte(*in++);
        if (channels == 1) {
          std::fill_n(pixel, 3, value);
        } else {
          pixel[channel] = value;
        }
      }
    }
  }
}

void check(const at::Tensor& images, const at::Tensor& truth, const at::Tensor& prediction) {
  const auto fits = [&](const at::Tensor& tensor, int64_t channels) {
    return tensor.dim() == 4 && tensor.size(0) == images.size(0) && tensor.size(1) == channels &&
           tensor.size(2) == images.size(2) && tensor.size(3) == images.size(3) && tensor.numel() > 0;
  };
  if (images.dim() == 4 && fits(images, 3) && fits(truth, 1) && fits(prediction, 1)) return;
  std::ostringstream text;
  text << "a picture takes images [n, 3, h, w] and masks [n, 1, h, w], not " << images.sizes() << ", " << truth.sizes()
       << " and " << prediction.sizes();
  throw std::invalid_argument(text.str());
}

}  // namespace

Image draw_picture(const at::Tensor& images, const at::Tensor& truth, const at::Tensor& prediction) {
  check(images, truth, prediction);
  const auto rows = static_cast<int>(images.size(0));
  const auto height = static_cast<int>(images.size(2));
  const auto width = static_cast<int>(images.size(3));
  const int row_step = height + kSeparator;
  const int column_step = width + kSeparator;

  Image picture({3 * column_step - kSeparator, rows * row_step - kSeparator}, 3);
  std::fill(picture.pixels.begin(), picture.pixels.end(), kSeparatorGrey);
  for (int row = 0; row < rows; ++row) {
    paste(images[row], 0, row * row_step, picture);
    paste(truth[row], column_step, row * row_step, picture);
    paste(prediction[row], 2 * column_step, row * row_step, picture);
  }
  return picture;
}

}  // namespace gpipe::examples
