#include "examples/resnet18_mnist/confusion.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

#include "examples/resnet18_mnist/glyphs.h"
#include "examples/resnet18_mnist/pen.h"

namespace gpipe::examples::mnist {
namespace {

// In pixels.
constexpr int kCell = 48;
constexpr int kLine = 1;
constexpr int kMargin = 36;
constexpr int kLabelHeight = 16;
constexpr int kCountHeight = 12;
constexpr int kGap = 2;  // between two digits

constexpr int kPaper = 48;
constexpr int kLightInk = 255;
constexpr int kDarkInk = 0;
constexpr int kHalfLight = 117;  // of this grey, black and white stand out alike

const Glyph& printed(char digit) {
  static constexpr std::array<size_t, 10> kStyles{0, 1, 0, 0, 1, 0, 0, 0, 0, 1};
  const auto value = static_cast<size_t>(digit - '0');
  return glyphs(static_cast<int>(value))[kStyles[value]];
}

// In pixels, from the top left.
struct Place {
  int x = 0;
  int y = 0;
};

// A digit with room for the pen around it.
void draw_printed(Image& picture, Place top_left, Size size, char digit, int grey) {
  constexpr int kRim = 1;
  const Size box{size.width + 2 * kRim, size.height + 2 * kRim};
  Pen pen(box, Pen::kPixel * size.height / 18);
  for (const Stroke& stroke : printed(digit)) {
    std::vector<Pen::Point> points;
    for (const Knot knot : stroke.knots) {
      points.push_back({(kRim * kGlyphWidth + knot.x * size.width) * Pen::kPixel / kGlyphWidth,
                        (kRim * kGlyphHeight + knot.y * size.height) * Pen::kPixel / kGlyphHeight});
    }
    pen.stroke(stroke.kind, points);
  }
  for (int y = 0; y < box.height; ++y) {
    for (int x = 0; x < box.width; ++x) {
      std::uint8_t& pixel = *picture.at(top_left.x - kRim + x, top_left.y - kRim + y);
      const int ink = pen.ink(x, y);
      pixel = static_cast<std::uint8_t>((pixel * (Pen::kPixel - ink) + grey * ink) / Pen::kPixel);
    }
  }
}

// In the middle of a box; not at all where it is too wide for that.
void draw_number(Image& picture, Place top_left, Size box, std::int64_t number, int height, int grey) {
  const auto text = std::to_string(number);
  const Size digit{height * kGlyphWidth / kGlyphHeight, height};
  const int step = digit.width + kGap;
  const int width = static_cast<int>(text.size()) * step - kGap;
  if (width > box.width - 2) return;
  Place place{top_left.x + (box.width - width) / 2, top_left.y + (box.height - height) / 2};
  for (const char c : text) {
    draw_printed(picture, place, digit, c, grey);
    place.x += step;
  }
}

void draw_cell(Image& picture, Place top_left, std::int64_t count, std::int64_t row_sum) {
  // The root makes the rare mistakes visible, which are what one looks for.
  const double brightness =
      std::sqrt(static_cast<double>(count) / static_cast<double>(std::max<std::int64_t>(1, row_sum)));
  const auto grey = static_cast<int>(std::lround(255 * brightness));
  for (int y = 0; y < kCell; ++y) {
    std::fill_n(picture.at(top_left.x, top_left.y + y), kCell, static_cast<std::uint8_t>(grey));
  }
  if (count == 0) return;
  draw_number(picture, top_left, {kCell, kCell}, count, kCountHeight, grey > kHalfLight ? kDarkInk : kLightInk);
}

}  // namespace

Image draw_confusion(const std::vector<std::int64_t>& counts, int classes) {
  if (classes < 1 || counts.size() != static_cast<size_t>(classes) * static_cast<size_t>(classes) ||
      std::any_of(counts.begin(), counts.end(), [](std::int64_t count) { return count < 0; })) {
    throw std::invalid_argument(std::to_string(counts.size()) + " counts are no confusion matrix of " +
                                std::to_string(classes) + " classes; give the square of that, none negative");
  }
  const int side = kMargin + classes * (kCell + kLine) + kLine;
  Image picture({side, side}, 1);
  std::fill(picture.pixels.begin(), picture.pixels.end(), static_cast<std::uint8_t>(kPaper));
  const auto edge = [](int cell) { return kMargin + kLine + cell * (kCell + kLine); };
  for (int row = 0; row < classes; ++row) {
    draw_number(picture, {edge(row), 0}, {kCell, kMargin}, row, kLabelHeight, kLightInk);
    draw_number(picture, {0, edge(row)}, {kMargin, kCell}, row, kLabelHeight, kLightInk);
    const auto first = counts.begin() + std::ptrdiff_t{row} * classes;
    const auto sum = std::accumulate(first, first + classes, std::int64_t{0});
    for (int column = 0; column < classes; ++column) draw_cell(picture, {edge(column), edge(row)}, first[column], sum);
  }
  return picture;
}

}  // namespace gpipe::examples::mnist
