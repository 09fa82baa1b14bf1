#pragma once

#include <cstdint>
#include <vector>

#include "examples/common/image.h"

namespace gpipe::examples {

/// A picture's height in canvas units, whatever its size in pixels; the width follows from the aspect ratio.
inline constexpr int kCanvasHeight = 10000;

struct Point {
  int x = 0;  ///< units, from the left
  int y = 0;  ///< units, from the top
};

struct Color {
  int red = 0;
  int green = 0;
  int blue = 0;
};

/// Each part times percent / 100, at most 255.
Color scale(Color color, int percent);
/// `percent` of the way from one colour to the other.
Color mix(Color from, Color to, int percent);

/// What a shape is to the mask: a class of things to find, or 0 for all else.
using Label = uint8_t;

/// An image and its mask, painted together: every shape covers what is below it in both. Edges are sharp, and pixels
/// are the same on every machine. Shapes may reach beyond the canvas.
class Canvas {
 public:
  explicit Canvas(Size size);

  int width() const { return width_; }
  const Image& image() const { return image_; }
  Image& image() { return image_; }
  const Image& mask() const { return mask_; }

  void rectangle(Point top_left, Point bottom_right, Color color, Label label = 0);
  /// Top to bottom from one colour to the other.
  void gradient(int top, int bottom, Color from, Color to);
  /// By the even-odd rule.
  void polygon(const std::vector<Point>& corners, Color color, Label label = 0);
  void ellipse(Point center, int radius_x, int radius_y, Color color, Label label = 0);
  /// Leaves the mask; the image keeps `percent` of its light.
  void shadow(Point center, int radius_x, int radius_y, int percent);

 private:
  int pixel(int units) const;
  int units(int pixel) const;
  // Calls paint(x, y) for the pixels of an ellipse, or of row y between two places in units.
  template <class Paint>
  void span(int y, int left, int right, Paint paint);
  template <class Paint>
  void fill_ellipse(Point center, int radius_x, int radius_y, Paint paint);
  void set(int x, int y, Color color, Label label);

  int width_;
  Image image_;
  Image mask_;
};

}  // namespace gpipe::examples
