#include "examples/common/drawing.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "examples/common/files.h"

namespace gpipe::examples {
namespace {

constexpr Color kPaper{0.19, 0.19, 0.19};
constexpr Color kInk{1, 1, 1};
constexpr Color kGrid{0.4, 0.4, 0.4};
constexpr std::array<Color, 6> kLines{
    {{0.45, 0.7, 1}, {1, 0.6, 0.25}, {0.5, 0.9, 0.5}, {1, 0.5, 0.75}, {0.95, 0.9, 0.4}, {0.7, 0.6, 1}}};

// A diagram of some columns of a history, `top` pixels below the upper edge.
void draw_diagram(Drawing& drawing, double top, const std::map<std::string, std::vector<double>>& curves) {
  constexpr double kLeft = 60, kTitle = 30, kWidth = 540, kHeight = 200;
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  std::size_t epochs = 0;
  for (const auto& [name, values] : curves) {
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    low = std::min(low, *least);
    high = std::max(high, *most);
    epochs = std::max(epochs, values.size());
  }
  if (high <= low) high = low + 1;
  const auto x = [&](std::size_t epoch) {
    return kLeft + kWidth * static_cast<double>(epoch) / static_cast<double>(std::max<std::size_t>(1, epochs - 1));
  };
  const auto y = [&](double value) { return top + kTitle + kHeight * (high - value) / (high - low); };

  cairo_t* cairo = drawing.cairo();
  for (int line = 0; line <= 4; ++line) {
    const double value = low + (high - low) * line / 4;
    drawing.rectangle(kLeft, y(value), kWidth, 1, kGrid);
    drawing.color(kInk);
    drawing.text(absl::StrFormat("%.3g", value), kLeft / 2, y(value), 12);
  }
  drawing.text("1", kLeft, top + kTitle + kHeight + 14, 12);
  drawing.text(absl::StrFormat("epoch %d", epochs), kLeft + kWidth - 20, top + kTitle + kHeight + 14, 12);
  std::size_t number = 0;
  for (const auto& [name, values] : curves) {
    drawing.color(kLines[number % kLines.size()]);
    const double place = (static_cast<double>(number++) + 0.5) / static_cast<double>(curves.size());
    drawing.text(name, kLeft + kWidth * place, top + kTitle / 2, 14);
    for (std::size_t epoch = 0; epoch < values.size(); ++epoch) cairo_line_to(cairo, x(epoch), y(values[epoch]));
    cairo_set_line_width(cairo, 2);
    cairo_stroke(cairo);
    cairo_arc(cairo, x(values.size() - 1), y(values.back()), 3, 0, 7);
    cairo_fill(cairo);
  }
}

}  // namespace

Drawing::Drawing(Size size, cairo_format_t format)
    : surface_(cairo_image_surface_create(format, size.width, size.height), cairo_surface_destroy),
      cairo_(cairo_create(surface_.get()), cairo_destroy) {
  if (format == CAIRO_FORMAT_RGB24) cairo_paint(cairo());
}

void Drawing::rectangle(double left, double top, double width, double height, Color color) {
  this->color(color);
  cairo_rectangle(cairo(), left, top, width, height);
  cairo_fill(cairo());
}

void Drawing::text(const std::string& text, double x, double y, double height) {
  cairo_select_font_face(cairo(), "sans-serif", CAIRO_FONT_SLANT_NORMAL, CAIRO_FONT_WEIGHT_NORMAL);
  cairo_set_font_size(cairo(), height);
  cairo_text_extents_t extents;
  cairo_text_extents(cairo(), text.c_str(), &extents);
  cairo_move_to(cairo(), x - extents.width / 2 - extents.x_bearing, y + height * 0.35);
  cairo_show_text(cairo(), text.c_str());
  cairo_new_path(cairo());
}

at::Tensor Drawing::bytes() const {
  auto* surface = surface_.get();
  cairo_surface_flush(surface);
  const int pixel_bytes = cairo_image_surface_get_format(surface) == CAIRO_FORMAT_A8 ? 1 : 4;
  const auto height = cairo_image_surface_get_height(surface);
  const auto width = cairo_image_surface_get_width(surface);
  return at::from_blob(cairo_image_surface_get_data(surface), {height, width, pixel_bytes},
                       {cairo_image_surface_get_stride(surface), pixel_bytes, 1}, at::kByte);
}

void Drawing::paste(const at::Tensor& image, int left, int top) {
  // Cairo's pixels are blue, green, red and nothing.
  const auto pixels = image.dim() == 2 ? image.unsqueeze(2) : image.flip(0).permute({1, 2, 0});
  auto place = bytes().narrow(0, top, pixels.size(0)).narrow(1, left, pixels.size(1)).narrow(2, 0, pixels.size(2));
  place.copy_(pixels);
  cairo_surface_mark_dirty(surface_.get());
}

at::Tensor Drawing::image() const {
  const auto pixels = bytes();
  if (pixels.size(2) == 1) return pixels.squeeze(2).clone();
  return pixels.narrow(2, 0, 3).permute({2, 0, 1}).flip(0);
}

void Drawing::write(const std::filesystem::path& path) const {
  const auto append = [](void* png, const unsigned char* data, unsigned int count) {
    static_cast<std::string*>(png)->append(reinterpret_cast<const char*>(data), count);
    return CAIRO_STATUS_SUCCESS;
  };
  std::string png;
  const auto status = cairo_surface_write_to_png_stream(surface_.get(), append, &png);
  if (status != CAIRO_STATUS_SUCCESS) throw std::runtime_error(path.string() + ": " + cairo_status_to_string(status));
  write_file(path, png);
}

void write_png(const std::filesystem::path& path, const at::Tensor& image) {
  const Size size{static_cast<int>(image.size(-1)), static_cast<int>(image.size(-2))};
  Drawing drawing(size, image.dim() == 2 ? CAIRO_FORMAT_A8 : CAIRO_FORMAT_RGB24);
  drawing.paste(image);
  drawing.write(path);
}

Drawing draw_table(const std::vector<Column>& columns) {
  constexpr int kSmallestTile = 256, kTitle = 36, kGap = 4;
  const auto& first = columns.at(0).tiles;
  const auto side = static_cast<int>(std::max(first.size(2), first.size(3)));
  const int factor = (kSmallestTile + side - 1) / side;
  const int width = static_cast<int>(first.size(3)) * factor + kGap;
  const int height = static_cast<int>(first.size(2)) * factor + kGap;
  const auto rows = static_cast<int>(first.size(0));
  const Size size{static_cast<int>(columns.size()) * width - kGap, kTitle + rows * height - kGap};

  Drawing drawing(size);
  drawing.rectangle(0, 0, size.width, size.height, kPaper);
  for (std::size_t column = 0; column < columns.size(); ++column) {
    const auto left = static_cast<int>(column) * width;
    drawing.color(kInk);
    drawing.text(columns[column].title, left + width / 2.0, kTitle / 2.0, 18);
    const auto tiles = columns[column].tiles.clamp(0, 1).mul(255).round().to(at::kByte);
    for (int row = 0; row < rows; ++row) {
      const auto enlarged = tiles[row].repeat_interleave(factor, 1).repeat_interleave(factor, 2);
      drawing.paste(enlarged, left, kTitle + row * height);
    }
  }
  return drawing;
}

Drawing draw_curves(const std::map<std::string, std::vector<double>>& values) {
  std::array<std::map<std::string, std::vector<double>>, 2> diagrams;
  for (const auto& [name, of_name] : values) diagrams[absl::StrContains(name, "loss") ? 0 : 1][name] = of_name;
  constexpr int kHeight = 260;
  Drawing drawing({640, 2 * kHeight});
  drawing.rectangle(0, 0, 640, 2 * kHeight, kPaper);
  for (int i = 0; i < 2; ++i) draw_diagram(drawing, i * kHeight, diagrams[static_cast<std::size_t>(i)]);
  return drawing;
}

}  // namespace gpipe::examples
