#pragma once

#include <ATen/core/Tensor.h>
#include <cairo.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "examples/common/image.h"

namespace gpipe::examples {

/// Parts of 0 to 1.
struct Color {
  double red = 0;
  double green = 0;
  double blue = 0;
};

/// A black picture to draw into with Cairo.
class Drawing {
 public:
  /// `format` is CAIRO_FORMAT_RGB24, or CAIRO_FORMAT_A8 for grey levels, which are Cairo's alpha.
  explicit Drawing(Size size, cairo_format_t format = CAIRO_FORMAT_RGB24);

  cairo_t* cairo() const { return cairo_.get(); }
  void color(Color color) { cairo_set_source_rgb(cairo(), color.red, color.green, color.blue); }
  void rectangle(double left, double top, double width, double height, Color color);
  /// The text in sans-serif letters of that height, centred at a place, in the present colour.
  void text(const std::string& text, double x, double y, double height);

  /// Copies an image (see image.h) to a place. A grey one needs a drawing in CAIRO_FORMAT_A8.
  void paste(const at::Tensor& image, int left = 0, int top = 0);
  /// Returns a copy of the pixels, as an image.
  at::Tensor image() const;
  /// Writes a PNG file. Errors: std::runtime_error with the path.
  void write(const std::filesystem::path& path) const;

 private:
  /// The bytes of the rows: [height, width, bytes per pixel].
  at::Tensor bytes() const;

  std::unique_ptr<cairo_surface_t, void (*)(cairo_surface_t*)> surface_;
  std::unique_ptr<cairo_t, void (*)(cairo_t*)> cairo_;
};

void write_png(const std::filesystem::path& path, const at::Tensor& image);

/// A column of a table of images: [n, 3, h, w], with values 0 to 1.
struct Column {
  std::string title;
  at::Tensor tiles;
};
/// Draws one row per image of the columns. Enlarges small ones by a whole number.
Drawing draw_table(const std::vector<Column>& columns);

/// Draws the values of each epoch, by name: a diagram of the losses, and one of the others.
Drawing draw_curves(const std::map<std::string, std::vector<double>>& values);

}  // namespace gpipe::examples
