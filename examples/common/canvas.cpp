#include "examples/common/canvas.h"

#include <algorithm>
#include <cmath>

namespace gpipe::examples {

Color scale(Color color, int percent) {
  const auto part = [percent](int value) { return std::min(255, value * percent / 100); };
  return {part(color.red), part(color.green), part(color.blue)};
}

Color mix(Color from, Color to, int percent) {
  const auto part = [percent](int a, int b) { return (a * (100 - percent) + b * percent) / 100; };
  return {part(from.red, to.red), part(from.green, to.green), part(from.blue, to.blue)};
}

Canvas::Canvas(Size size)
    : width_(static_cast<int>(int64_t{kCanvasHeight} * size.width / size.height)), image_(size, 3), mask_(size, 1) {}

// Returns the first pixel whose centre is at or after that place.
int Canvas::pixel(int units) const {
  const int64_t numerator = 2 * int64_t{image_.height} * units - kCanvasHeight;
  const int64_t denominator = 2 * kCanvasHeight;
  const int64_t quotient = numerator / denominator;
  return static_cast<int>(quotient + (numerator % denominator > 0));
}

// Returns the place of a pixel's centre.
int Canvas::units(int pixel) const {
  return static_cast<int>((2 * int64_t{pixel} + 1) * kCanvasHeight / (2 * int64_t{image_.height}));
}

void Canvas::set(int x, int y, Color color, Label label) {
  uint8_t* rgb = image_.at(x, y);
  rgb[0] = static_cast<uint8_t>(color.red);
  rgb[1] = static_cast<uint8_t>(color.green);
  rgb[2] = static_cast<uint8_t>(color.blue);
  *mask_.at(x, y) = label;
}

template <class Paint>
void Canvas::span(int y, int left, int right, Paint paint) {
  const int end = std::min(pixel(right), image_.width);
  for (int x = std::max(0, pixel(left)); x < end; ++x) paint(x, y);
}

void Canvas::rectangle(Point top_left, Point bottom_right, Color color, Label label) {
  const int end = std::min(pixel(bottom_right.y), image_.height);
  for (int y = std::max(0, pixel(top_left.y)); y < end; ++y) {
    span(y, top_left.x, bottom_right.x, [&](int x, int row) { set(x, row, color, label); });
  }
}

void Canvas::gradient(int top, int bottom, Color from, Color to) {
  const int end = std::min(pixel(bottom), image_.height);
  for (int y = std::max(0, pixel(top)); y < end; ++y) {
    const Color color = mix(from, to, std::clamp((units(y) - top) * 100 / std::max(1, bottom - top), 0, 100));
    span(y, 0, width_, [&](int x, int row) { set(x, row, color, 0); });
  }
}

void Canvas::polygon(const std::vector<Point>& corners, Color color, Label label) {
  const auto [highest, lowest] =
      std::minmax_element(corners.begin(), corners.end(), [](Point a, Point b) { return a.y < b.y; });
  const int end = std::min(pixel(lowest->y), image_.height);
  std::vector<int> crossings;
  for (int y = std::max(0, pixel(highest->y)); y < end; ++y) {
    const int at = units(y);
    crossings.clear();
    for (size_t i = 0; i < corners.size(); ++i) {
      const Point a = corners[i];
      const Point b = corners[(i + 1) % corners.size()];
      if ((a.y <= at) == (b.y <= at)) continue;
      crossings.push_back(static_cast<int>(a.x + int64_t{b.x - a.x} * (at - a.y) / (b.y - a.y)));
    }
    std::sort(crossings.begin(), crossings.end());
    for (size_t i = 0; i + 1 < crossings.size(); i += 2) {
      span(y, crossings[i], crossings[i + 1], [&](int x, int row) { set(x, row, color, label); });
    }
  }
}

template <class Paint>
void Canvas::fill_ellipse(Point center, int radius_x, int radius_y, Paint paint) {
  const int end = std::min(pixel(center.y + radius_y), image_.height);
  for (int y = std::max(0, pixel(center.y - radius_y)); y < end; ++y) {
    const double rise = units(y) - center.y;
    const double square = static_cast<double>(radius_y) * radius_y - rise * rise;
    // Integers, except for a square root and a division, which IEEE 754 defines to the last bit.
    const int half = static_cast<int>(radius_x * std::sqrt(std::max(0.0, square)) / radius_y);
    span(y, center.x - half, center.x + half, paint);
  }
}

void Canvas::ellipse(Point center, int radius_x, int radius_y, Color color, Label label) {
  fill_ellipse(center, radius_x, radius_y, [&](int x, int row) { set(x, row, color, label); });
}

void Canvas::shadow(Point center, int radius_x, int radius_y, int percent) {
  fill_ellipse(center, radius_x, radius_y, [&](int x, int row) {
    uint8_t* rgb = image_.at(x, row);
    std::transform(rgb, rgb + 3, rgb, [percent](int value) { return static_cast<uint8_t>(value * percent / 100); });
  });
}

}  // namespace gpipe::examples
