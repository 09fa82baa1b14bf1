#pragma once

#include <vector>

namespace gpipe::examples::mnist {

/// A glyph fills a box of this size; x grows to the right, y down.
inline constexpr int kGlyphWidth = 60;
inline constexpr int kGlyphHeight = 100;

struct Knot {
  int x = 0;
  int y = 0;
};

/// A line through its knots, straight from one to the next or smooth. Where the last knot is the first again, a smooth
/// one is smooth there too.
struct Stroke {
  enum class Kind { kStraight, kSmooth };
  Kind kind = Kind::kStraight;
  std::vector<Knot> knots;
};
using Glyph = std::vector<Stroke>;

/// The ways to write a digit, 0 to 9: as people write it, as it is printed, as seven segments show it.
const std::vector<Glyph>& glyphs(int digit);

}  // namespace gpipe::examples::mnist
