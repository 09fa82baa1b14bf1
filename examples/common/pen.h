#pragma once

#include <cstdint>
#include <vector>

#include "examples/common/glyphs.h"
#include "examples/common/image.h"

namespace gpipe::examples {

/// Draws strokes with soft edges. It computes in integers, so pixels are the same on every machine.
class Pen {
 public:
  /// Units per pixel. Also the ink of a pixel that is fully covered.
  static constexpr int kPixel = 256;

  /// In units, from the top left.
  struct Point {
    int64_t x = 0;
    int64_t y = 0;
  };

  /// For an image of that size. `radius` is half the width of a line, in units.
  Pen(Size size, int radius);

  /// From the first point to the last, straight or smooth.
  void stroke(Stroke::Kind kind, const std::vector<Point>& points);

  /// The ink of a pixel, 0 to kPixel.
  int ink(int x, int y) const;

 private:
  void line(Point from, Point to);
  int reach() const { return radius_ + kPixel / 2; }

  const Size size_;
  const int radius_;
  std::vector<int64_t> nearest_;  // squared distance of each pixel's centre from the nearest line
};

}  // namespace gpipe::examples
