#pragma once

#include <cstdint>
#include <vector>

#include "examples/common/image.h"

namespace gpipe::examples {

/// The height of every canvas in canvas units, for any size in pixels. The width follows from the aspect ratio.
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

/// Multiplies each part by percent / 100, up to 255.
Color scale(Color color, int percent);
/// Goes `percent` of the way from one colour to the other.
Color mix(Color from, Color to, int percent);

/// The class of a mask's pixel: 0 is the background, others are the things to find.
using Label = uint8_t;

/// An image and its mask, painted together: each shape covers what is below it in both. Edges are sharp, and pixels are
/// the same on every machine. Shapes can reach beyond the canvas.
class Canvas {
 public:
  explicit Canvas(Size size);

  int width() const { return width_; }
  const Image& image() const { return image_; }
  Image& image() { return image_; }
  const Image& mask() const { return mask_; }

  void rectangle(Point top_left, Point bottom_right, Color color, Label label = 0);
  /// Fills all rows from `top` to `bottom`, changing from one colour to the other.
  void gradient(int top, int bottom, Color from, Color to);
  /// Filled by the even-odd rule.
  void polygon(const std::vector<Point>& corners, Color color, Label label = 0);
  void ellipse(Point center, int radius_x, int radius_y, Color color, Label label = 0);
  /// Darkens the image to `percent` of its light and leaves the mask alone.
  void shadow(Point center, int radius_x, int radius_y, int percent);

 private:
  int pixel(int units) const;
  int units(int pixel) const;
  // Call paint(x, y) for each pixel: of row y between two places in units, or of an ellipse.
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
