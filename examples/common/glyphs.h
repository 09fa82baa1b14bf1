#pragma once

#include <vector>

namespace gpipe::examples {

/// A digit fills a box of this size. x grows to the right, y grows down.
inline constexpr int kGlyphWidth = 60;
inline constexpr int kGlyphHeight = 100;

struct Knot {
  int x = 0;
  int y = 0;
};

/// A line through its knots, straight or smooth between them. A smooth line whose last knot equals its first is smooth
/// there too.
struct Stroke {
  enum class Kind { kStraight, kSmooth };
  Kind kind = Kind::kStraight;
  std::vector<Knot> knots;
};
using Glyph = std::vector<Stroke>;

/// The ways to write a digit, 0 to 9: by hand, in print, and on a seven-segment display.
const std::vector<Glyph>& digit_glyphs(int digit);

/// A character in print: a to z, 0 to 9, and any of ".,:-%". Any other character is an empty glyph.
const Glyph& print_glyph(char character);

}  // namespace gpipe::examples
