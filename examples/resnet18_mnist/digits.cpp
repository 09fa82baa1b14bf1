#include "examples/resnet18_mnist/digits.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/common/files.h"
#include "examples/common/glyphs.h"
#include "examples/common/pen.h"

namespace gpipe::examples::mnist {
namespace {

using Point = Pen::Point;

constexpr int kPixel = Pen::kPixel;

// Maps a glyph's knots into the image: moves the corners of its box, then scales, slants, rotates and shifts it.
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
    // In ten-thousandths of the box's sides, relative to its centre.
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

}  // namespace

Image draw_digit(Random& random, int digit) {
  const auto& styles = digit_glyphs(digit);
  const Glyph& glyph = styles[static_cast<size_t>(random.between(0, static_cast<int>(styles.size()) - 1))];
  const Placement placement(random);
  Pen pen(kDigitSize, random.between(kPixel * 5 / 10, kPixel * 19 / 10));
  for (const Stroke& stroke : glyph) {
    std::vector<Point> points;
    for (const Knot knot : stroke.knots) points.push_back(placement.at(knot));
    pen.stroke(stroke.kind, points);
  }

  const int paper = random.between(0, 50);
  const int ink = random.between(140, 255);
  const int noise = random.between(0, 45);
  Image image(kDigitSize, 1);
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      const int value = paper + (ink - paper) * pen.ink(x, y) / kPixel + random.between(-noise, noise);
      *image.at(x, y) = static_cast<uint8_t>(std::clamp(value, 0, 255));
    }
  }
  return image;
}

LabelledImages draw_digits(int count, uint64_t seed, Part part) {
  if (count < 1) throw std::invalid_argument("cannot draw " + std::to_string(count) + " digits; give at least 1");
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
  make_directory(directory);
  write_idx(training_files(directory), training);
  write_idx(test_files(directory), test);
}

}  // namespace gpipe::examples::mnist
