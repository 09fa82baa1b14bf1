#include "examples/common/pen.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace gpipe::examples {
namespace {

using Point = Pen::Point;

constexpr int kCurveSteps = 8;

int64_t dot(Point a, Point b) { return a.x * b.x + a.y * b.y; }
Point operator-(Point a, Point b) { return {a.x - b.x, a.y - b.y}; }

// The Catmull-Rom curve through the points: each segment depends on its two points and their neighbours.
std::vector<Point> smoothed(const std::vector<Point>& points) {
  const size_t last = points.size() - 1;
  const bool closed = points.front().x == points.back().x && points.front().y == points.back().y;
  std::vector<Point> curve{points.front()};
  for (size_t i = 0; i < last; ++i) {
    const Point before = i > 0 ? points[i - 1] : points[closed ? last - 1 : 0];
    const Point from = points[i];
    const Point to = points[i + 1];
    const Point after = i + 1 < last ? points[i + 2] : points[closed ? 1 : last];
    const auto value = [](int64_t a, int64_t b, int64_t c, int64_t d, int64_t t) {
      const int64_t n = kCurveSteps;
      return (2 * b * n * n * n + (c - a) * t * n * n + (2 * a - 5 * b + 4 * c - d) * t * t * n +
              (3 * b - a - 3 * c + d) * t * t * t) /
             (2 * n * n * n);
    };
    for (int64_t t = 1; t <= kCurveSteps; ++t) {
      curve.push_back({value(before.x, from.x, to.x, after.x, t), value(before.y, from.y, to.y, after.y, t)});
    }
  }
  return curve;
}

}  // namespace

Pen::Pen(Size size, int radius)
    : size_(size),
      radius_(radius),
      nearest_(static_cast<size_t>(size.width) * static_cast<size_t>(size.height),
               std::numeric_limits<int64_t>::max()) {}

void Pen::stroke(Stroke::Kind kind, const std::vector<Point>& points) {
  const auto& path = kind == Stroke::Kind::kSmooth ? smoothed(points) : points;
  for (size_t i = 1; i < path.size(); ++i) line(path[i - 1], path[i]);
}

void Pen::line(Point from, Point to) {
  const auto first_pixel = [this](int64_t edge) { return std::max<int64_t>(0, (edge - reach()) / kPixel); };
  const auto last_pixel = [this](int64_t edge, int side) {
    return std::min<int64_t>(side - 1, (edge + reach()) / kPixel);
  };
  const Point along = to - from;
  const int64_t square = dot(along, along);
  const auto [left, right] = std::minmax(from.x, to.x);
  const auto [top, bottom] = std::minmax(from.y, to.y);
  for (int64_t y = first_pixel(top); y <= last_pixel(bottom, size_.height); ++y) {
    for (int64_t x = first_pixel(left); x <= last_pixel(right, size_.width); ++x) {
      const Point center{x * kPixel + kPixel / 2, y * kPixel + kPixel / 2};
      const Point offset = center - from;
      const int64_t passed = dot(offset, along);
      int64_t distance = 0;
      if (passed <= 0) {
        distance = dot(offset, offset);
      } else if (passed >= square) {
        distance = dot(center - to, center - to);
      } else {
        distance = dot(offset, offset) - passed * passed / square;
      }
      int64_t& nearest = nearest_[static_cast<size_t>(y * size_.width + x)];
      nearest = std::min(nearest, distance);
    }
  }
}

int Pen::ink(int x, int y) const {
  const int64_t nearest = nearest_[static_cast<size_t>(y) * static_cast<size_t>(size_.width) + static_cast<size_t>(x)];
  if (nearest > int64_t{reach()} * reach()) return 0;
  // IEEE 754 defines a square root to the last bit.
  const int distance = static_cast<int>(std::sqrt(static_cast<double>(nearest)));
  return std::clamp(reach() - distance, 0, kPixel);
}

}  // namespace gpipe::examples
