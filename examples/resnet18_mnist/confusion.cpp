#include "examples/resnet18_mnist/confusion.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

#include "absl/strings/str_format.h"
#include "examples/common/text.h"

namespace gpipe::examples::mnist {
namespace {

// In pixels.
constexpr int kCell = 48;
constexpr int kPitch = kCell + 1;  // with the line between two cells
constexpr int kLeft = 96;          // of the first column's line
constexpr int kTop = 88;           // of the first row's line
constexpr int kRight = 12;
constexpr int kBottom = 12;
constexpr int kTitleBar = 36;
constexpr int kAxisBar = 24;
constexpr int kAxisName = 60;
constexpr int kLabelHeight = 16;
constexpr int kCountHeight = 12;

constexpr std::uint8_t kPaper = 48;
constexpr Color kLightInk{255, 255, 255};
constexpr Color kDarkInk{0, 0, 0};
constexpr int kHalfLight = 117;  // a grey with the same contrast to black and to white

int edge(int start, int cell) { return start + 1 + cell * kPitch; }

void draw_cell(Image& picture, int left, int top, std::int64_t count, std::int64_t row_sum) {
  // The square root makes rare mistakes visible.
  const double brightness =
      std::sqrt(static_cast<double>(count) / static_cast<double>(std::max<std::int64_t>(1, row_sum)));
  const auto grey = static_cast<int>(std::lround(255 * brightness));
  for (int y = 0; y < kCell; ++y) std::fill_n(picture.at(left, top + y), kCell, static_cast<std::uint8_t>(grey));
  const Text number{std::to_string(count), kCountHeight};
  if (count == 0 || text_width(number) > kCell - 4) return;
  draw_text_centered(picture, left, top, {kCell, kCell}, number, grey > kHalfLight ? kDarkInk : kLightInk);
}

}  // namespace

Image draw_confusion(const std::vector<std::int64_t>& counts, int classes) {
  if (classes < 1 || counts.size() != static_cast<size_t>(classes) * static_cast<size_t>(classes) ||
      std::any_of(counts.begin(), counts.end(), [](std::int64_t count) { return count < 0; })) {
    throw std::invalid_argument(std::to_string(counts.size()) + " counts are not a confusion matrix of " +
                                std::to_string(classes) + " classes; give the square of the classes, none negative");
  }
  const int side = classes * kPitch + 1;
  Image picture({kLeft + side + kRight, kTop + side + kBottom}, 1);
  std::fill(picture.pixels.begin(), picture.pixels.end(), kPaper);

  std::int64_t right = 0;
  for (int k = 0; k < classes; ++k) right += counts[static_cast<size_t>(k * (classes + 1))];
  const auto all = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const double accuracy = 100 * static_cast<double>(right) / static_cast<double>(std::max<std::int64_t>(1, all));
  const Size title{picture.width, kTitleBar};
  draw_text_centered(picture, 0, 0, title, {absl::StrFormat("accuracy %.2f %%", accuracy), kLabelHeight}, kLightInk);
  draw_text_centered(picture, kLeft, kTitleBar, {side, kAxisBar}, {"predicted", kLabelHeight}, kLightInk);
  draw_text_centered(picture, 0, kTop, {kAxisName, side}, {"true", kLabelHeight}, kLightInk);

  for (int row = 0; row < classes; ++row) {
    const Text label{std::to_string(row), kLabelHeight};
    const int bar = kTitleBar + kAxisBar;
    draw_text_centered(picture, edge(kLeft, row), bar, {kCell, kTop - bar}, label, kLightInk);
    draw_text_centered(picture, kAxisName, edge(kTop, row), {kLeft - kAxisName, kCell}, label, kLightInk);
    const auto first = counts.begin() + std::ptrdiff_t{row} * classes;
    const auto sum = std::accumulate(first, first + classes, std::int64_t{0});
    for (int column = 0; column < classes; ++column) {
      draw_cell(picture, edge(kLeft, column), edge(kTop, row), first[column], sum);
    }
  }
  return picture;
}

}  // namespace gpipe::examples::mnist
