#include "examples/resnet18_mnist/digits.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/common/files.h"
#include "examples/resnet18_mnist/glyphs.h"

namespace gpipe::examples::mnist {
namespace {

constexpr int kPixel = 256;  // canvas units in a pixel
constexpr int kCurveSteps = 8;

// In canvas units, from the top left.
struct Point {
  int64_t x = 0;
  int64_t y = 0;
};

int64_t dot(Point a, Point b) { return a.x * b.x + a.y * b.y; }
Point operator-(Point a, Point b) { return {a.x - b.x, a.y - b.y}; }

// Where a glyph's knots come to lie: bent by moving the corners of its box, then scaled, slanted, turned and shifted.
class Placement {
 public:
  explicit Placement(Random& random) {
    for (Point& corner : corners_) corner = {random.between(-800, 800), random.between(-800, 800)};
    height_ = random.between(14 * kPixel, 22 * kPixel);
    width_ = height_ * random.between(45, 75) / 100;
    slant_ = random.between(-200, 350);
    turn_ = random.between(-150, 150);
    center_ = {14 * kPixel + random.between(-3 * kPixel, 3 * kPixel),
               14 * kPixel + random.between(-3 * kPixel, 3 * kPixel)};
  }

  Point at(Knot knot) const {
    const int64_t right = knot.x * 100 / kGlyphWidth;
    const int64_t down = knot.y;
    const std::array<int64_t, 4> weights{(100 - right) * (100 - down), right * (100 - down), (100 - right) * down,
                                         right * down};
    // In ten-thousandths of the box's sides, from its centre.
    Point place{right * 100 - 5000, down * 100 - 5000};
    for (size_t i = 0; i < corners_.size(); ++i) {
      place.x += corners_[i].x * weights[i] / 10000;
      place.y += corners_[i].y * weights[i] / 10000;
    }
    place = {place.x * width_ / 10000, place.y * height_ / 10000};
    place.x -= place.y * slant_ / 1000;
    // With t the tangent of half the angle, cos = (1 - t^2) / (1 + t^2) and sin = 2 t / (1 + t^2).
    const int64_t cosine = 1000000 - turn_ * turn_;
    const int64_t sine = 2000 * turn_;
    const int64_t unit = 1000000 + turn_ * turn_;
    return {center_.x + (place.x * cosine - place.y * sine) / unit,
            center_.y + (place.x * sine + place.y * cosine) / unit};
  }

 private:
  std::array<Point, 4> corners_;  // ten-thousandths of the box's sides
  int64_t height_;
  int64_t width_;
  int64_t slant_;  // thousandths of the height
  int64_t turn_;   // thousandths: the tangent of half the angle
  Point center_;
};

// The Catmull-Rom curve through the points: each bend depends on the two neighbours before it and after it.
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

// The distance of each pixel's centre to the nearest line so far.
class Pen {
 public:
  explicit Pen(int radius) : radius_(radius) { nearest_.fill(std::numeric_limits<int64_t>::max()); }

  void line(Point from, Point to) {
    const Point along = to - from;
    const int64_t square = dot(along, along);
    const auto [left, right] = std::minmax(from.x, to.x);
    const auto [top, bottom] = std::minmax(from.y, to.y);
    for (int64_t y = first_pixel(top); y <= last_pixel(bottom); ++y) {
      for (int64_t x = first_pixel(left); x <= last_pixel(right); ++x) {
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
        int64_t& nearest = nearest_[static_cast<size_t>(y * kDigitSize.width + x)];
        nearest = std::min(nearest, distance);
      }
    }
  }

  // How much of a pixel is ink, of kPixel.
  int coverage(size_t pixel) const {
    if (nearest_[pixel] > int64_t{reach()} * reach()) return 0;
    // IEEE 754 fixes a square root to the last bit.
    const int distance = static_cast<int>(std::sqrt(static_cast<double>(nearest_[pixel])));
    return std::clamp(reach() - distance, 0, kPixel);
  }

 private:
  int reach() const { return radius_ + kPixel / 2; }
  int64_t first_pixel(int64_t edge) const { return std::max<int64_t>(0, (edge - reach()) / kPixel); }
  int64_t last_pixel(int64_t edge) const { return std::min<int64_t>(kDigitSize.width - 1, (edge + reach()) / kPixel); }

  const int radius_;
  std::array<int64_t, static_cast<size_t>(kDigitSize.width) * kDigitSize.height> nearest_;  // squared
};

}  // namespace

Image draw_digit(Random& random, int digit) {
  const auto& styles = glyphs(digit);
  const Glyph& glyph = styles[static_cast<size_t>(random.between(0, static_cast<int>(styles.size()) - 1))];
  const Placement placement(random);
  Pen pen(random.between(kPixel * 5 / 10, kPixel * 19 / 10));
  for (const Stroke& stroke : glyph) {
    std::vector<Point> points;
    for (const Knot knot : stroke.knots) points.push_back(placement.at(knot));
    if (stroke.kind == Stroke::Kind::kSmooth) points = smoothed(points);
    for (size_t i = 1; i < points.size(); ++i) pen.line(points[i - 1], points[i]);
  }

  const int paper = random.between(0, 50);
  const int ink = random.between(140, 255);
  const int noise = random.between(0, 45);
  Image image(kDigitSize, 1);
  for (size_t i = 0; i < image.pixels.size(); ++i) {
    const int value = paper + (ink - paper) * pen.coverage(i) / kPixel + random.between(-noise, noise);
    image.pixels[i] = static_cast<uint8_t>(std::clamp(value, 0, 255));
  }
  return image;
}

LabelledImages draw_digits(int count, uint64_t seed, Part part) {
  if (count < 1) throw std::invalid_argument("cannot draw " + std::to_string(count) + " digits; at least 1");
  const uint64_t first_stream = part == Part::kTraining ? 0 : uint64_t{1} << 32;
  LabelledImages set{.size = kDigitSize, .pixels = {}, .labels = {}};
  for (int i = 0; i < count; ++i) {
    Random random(seed, first_stream + static_cast<uint64_t>(i));
    const int digit = random.between(0, 9);
    const Image image = draw_digit(random, digit);
    set.pixels.insert(set.pixels.end(), image.pixels.begin(), image.pixels.end());
    set.labels.push_back(static_cast<uint8_t>(digit));
  }
  return set;
}

void write_digits(const std::filesystem::path& directory, int training_count, int test_count, uint64_t seed) {
  const auto training = draw_digits(training_count, seed, Part::kTraining);
  const auto test = draw_digits(test_count, seed, Part::kTest);
  check_writable_directory(directory);
  write_idx(training_files(directory), training);
  write_idx(test_files(directory), test);
}

}  // namespace gpipe::examples::mnist
