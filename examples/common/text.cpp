#include "examples/common/text.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "examples/common/glyphs.h"
#include "examples/common/pen.h"

namespace gpipe::examples {
namespace {

// In the units of a glyph's box.
constexpr int kGap = 22;  // between two characters
constexpr int kSpace = 12;
constexpr int kDescent = 30;
constexpr int kRim = 1;  // pixels around the text, for the width of the pen

// The columns that a glyph covers: first and last.
std::pair<int, int> extent(const Glyph& glyph) {
  if (glyph.empty()) return {0, kSpace};
  int left = kGlyphWidth;
  int right = 0;
  for (const Stroke& stroke : glyph) {
    for (const Knot knot : stroke.knots) {
      left = std::min(left, knot.x);
      right = std::max(right, knot.x);
    }
  }
  return {left, right};
}

int to_pixels(int units, int height) { return (units * height + kGlyphHeight - 1) / kGlyphHeight; }

}  // namespace

int text_width(const Text& text) {
  int units = 0;
  for (const char character : text.characters) {
    const auto [left, right] = extent(print_glyph(character));
    units += right - left + kGap;
  }
  return to_pixels(std::max(0, units - kGap), text.height);
}

void draw_text(Image& picture, int left, int top, const Text& text, Color ink) {
  const Size box{text_width(text) + 2 * kRim, to_pixels(kGlyphHeight + kDescent, text.height) + 2 * kRim};
  Pen pen(box, Pen::kPixel * text.height / 18);
  const auto place = [&](int units) -> int64_t {
    return kRim * Pen::kPixel + int64_t{units} * text.height * Pen::kPixel / kGlyphHeight;
  };
  int position = 0;
  for (const char character : text.characters) {
    const Glyph& glyph = print_glyph(character);
    const auto [first, last] = extent(glyph);
    for (const Stroke& stroke : glyph) {
      std::vector<Pen::Point> points;
      for (const Knot knot : stroke.knots) points.push_back({place(position + knot.x - first), place(knot.y)});
      pen.stroke(stroke.kind, points);
    }
    position += last - first + kGap;
  }

  const std::array<int, 3> color{ink.red, ink.green, ink.blue};
  for (int y = std::max(0, kRim - top); y < std::min(box.height, picture.height - top + kRim); ++y) {
    for (int x = std::max(0, kRim - left); x < std::min(box.width, picture.width - left + kRim); ++x) {
      const int covered = pen.ink(x, y);
      uint8_t* pixel = picture.at(left - kRim + x, top - kRim + y);
      for (int c = 0; c < picture.channels; ++c) {
        pixel[c] = static_cast<uint8_t>((pixel[c] * (Pen::kPixel - covered) + color[c] * covered) / Pen::kPixel);
      }
    }
  }
}

void draw_text_centered(Image& picture, int left, int top, Size box, const Text& text, Color ink) {
  draw_text(picture, left + (box.width - text_width(text)) / 2, top + (box.height - text.height) / 2, text, ink);
}

}  // namespace gpipe::examples
