#include "examples/unet/scene.h"

#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <numbers>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "examples/common/drawing.h"
#include "examples/common/random.h"
#include "examples/unet/data.h"

namespace gpipe::examples::unet {
namespace {

constexpr int kCar = 1, kWindow = 2, kWheel = 3;

/// The side view of a car that faces right. Corners are pairs of thousandths: x of its length, from the rear; y of its
/// height, from the ground.
struct CarBody {
  double height;  // of the length
  std::vector<int> outline;
  std::vector<std::vector<int>> windows;
};

// A saloon, a hatchback, an off-roader and a pick-up.
const std::vector<CarBody> kCarBodies = {
    {0.31,
     {0,   180,  5,   480, 60,  570, 230, 600, 340, 960, 400,  1000,
      600, 1000, 660, 950, 770, 600, 960, 490, 995, 380, 1000, 180},
     {{275, 610, 360, 920, 490, 920, 490, 610}, {515, 610, 515, 920, 640, 900, 730, 610}}},
    {0.37,
     {0, 180, 0, 560, 40, 620, 110, 950, 180, 1000, 560, 1000, 630, 960, 770, 620, 950, 520, 995, 400, 1000, 180},
     {{95, 640, 155, 920, 360, 920, 360, 640}, {390, 640, 390, 920, 600, 910, 720, 640}}},
    {0.4,
     {0, 200, 0, 620, 30, 950, 80, 1000, 610, 1000, 670, 960, 760, 650, 965, 580, 1000, 430, 1000, 200},
     {{60, 660, 85, 920, 250, 920, 250, 660},
      {275, 660, 275, 920, 410, 920, 410, 660},
      {475, 660, 475, 920, 630, 910, 720, 660}}},
    {0.37,
     {0, 220, 0, 570, 370, 570, 390, 970, 430, 1000, 620, 1000, 670, 960, 750, 610, 960, 550, 1000, 430, 1000, 220},
     {{420, 630, 435, 920, 540, 920, 540, 630}, {560, 630, 560, 920, 640, 910, 715, 630}}},
};

Color scale(Color color, double factor) {
  const auto part = [=](double value) { return std::min(1.0, value * factor); };
  return {part(color.red), part(color.green), part(color.blue)};
}

// Paints an image and its mask together: each shape covers what is below it in both. The unit is the height. Shapes can
// reach beyond the image.
class Painter {
 public:
  Painter(Random random, Size size, int classes)
      : random_(std::move(random)), image_(size), mask_(size, CAIRO_FORMAT_A8), classes_(classes) {
    for (auto* cairo : {image_.cairo(), mask_.cairo()}) cairo_scale(cairo, size.height, size.height);
    width_ = static_cast<double>(size.width) / size.height;
    cairo_set_antialias(mask_.cairo(), CAIRO_ANTIALIAS_NONE);
    cairo_set_operator(mask_.cairo(), CAIRO_OPERATOR_SOURCE);
  }

  Scene paint() {
    horizon_ = between(0.46, 0.58);
    sky();
    buildings();
    for (int trees = below(4); trees > 0; --trees) tree(across(), horizon_ + between(0, 0.03));
    street();
    for (int things = 1 + below(5); things > 0; --things) thing(across(), horizon_ + between(0.01, 0.13));
    car();
    return {lit(image_.image()), mask_.image()};
  }

 private:
  double between(double low, double high) { return random_.between(low, high); }
  int below(int count) { return random_.below(count); }
  double across() { return between(0, width_); }

  Color grey(double low, double high) {
    const double value = between(low, high);
    return {value + between(-0.02, 0.02), value + between(-0.02, 0.02), value + between(-0.02, 0.02)};
  }

  Color paint_color() {
    static constexpr Color kPaints[] = {{.09, .09, .11}, {.93, .93, .93}, {.71, .72, .74}, {.41, .42, .44},
                                        {.70, .10, .13}, {.38, .07, .09}, {.13, .24, .59}, {.47, .65, .82},
                                        {.13, .36, .20}, {.90, .75, .14}, {.87, .44, .11}, {.39, .27, .18},
                                        {.81, .75, .60}, {.07, .47, .51}};
    const Color base = kPaints[below(std::size(kPaints))];
    return {base.red + between(-0.05, 0.05), base.green + between(-0.05, 0.05), base.blue + between(-0.05, 0.05)};
  }

  // Fills the path of the image's context, in the mask too.
  void fill(Color color, int label = 0) {
    auto* path = cairo_copy_path(image_.cairo());
    cairo_append_path(mask_.cairo(), path);
    cairo_path_destroy(path);
    cairo_set_source_rgba(mask_.cairo(), 0, 0, 0, (label < classes_ ? label : kCar) / 255.0);
    cairo_fill(mask_.cairo());
    image_.color(color);
    cairo_fill(image_.cairo());
  }

  void rectangle(double left, double top, double right, double bottom, Color color) {
    cairo_rectangle(image_.cairo(), left, top, right - left, bottom - top);
    fill(color);
  }

  void ellipse(double x, double y, double radius_x, double radius_y, Color color, int label = 0) {
    ellipse_path(x, y, radius_x, radius_y);
    fill(color, label);
  }

  void ellipse_path(double x, double y, double radius_x, double radius_y) {
    auto* cairo = image_.cairo();
    cairo_save(cairo);
    cairo_translate(cairo, x, y);
    cairo_scale(cairo, radius_x, radius_y);
    cairo_arc(cairo, 0, 0, 1, 0, 2 * std::numbers::pi);
    cairo_restore(cairo);
  }

  // All rows from `top` to `bottom`, changing from one colour to the other.
  void gradient(double top, double bottom, Color from, Color to) {
    rectangle(0, top, width_, bottom, from);
    auto* pattern = cairo_pattern_create_linear(0, top, 0, bottom);
    cairo_pattern_add_color_stop_rgb(pattern, 0, from.red, from.green, from.blue);
    cairo_pattern_add_color_stop_rgb(pattern, 1, to.red, to.green, to.blue);
    cairo_set_source(image_.cairo(), pattern);
    cairo_rectangle(image_.cairo(), 0, top, width_, bottom - top);
    cairo_fill(image_.cairo());
    cairo_pattern_destroy(pattern);
  }

  void sky() {
    static constexpr Color kSkies[][2] = {{{.35, .57, .84}, {.75, .84, .94}},
                                          {{.65, .67, .70}, {.84, .85, .86}},
                                          {{.31, .31, .51}, {.94, .65, .41}},
                                          {{.10, .11, .19}, {.27, .29, .41}}};
    const auto& [top, bottom] = kSkies[below(4)];
    gradient(0, horizon_, top, bottom);
  }

  void buildings() {
    double right = 0;
    for (double left = between(-0.15, 0); left < width_;
         left = right + (random_.chance(0.3) ? between(0.02, 0.18) : 0)) {
      right = left + between(0.15, 0.45);
      const double top = between(-0.05, horizon_ - 0.15);
      const Color wall = random_.chance(0.5) ? grey(0.24, 0.88) : paint_color();
      const Color glass = random_.chance(0.5) ? Color{0.9, 0.85, 0.65} : scale(wall, 0.55);
      rectangle(left, top, right, horizon_, wall);
      const double step_x = between(0.05, 0.09);
      const double step_y = between(0.06, 0.1);
      for (double y = top + 0.03; y + step_y / 2 < horizon_ - 0.02; y += step_y) {
        for (double x = left + 0.02; x + step_x / 2 < right - 0.01; x += step_x) {
          rectangle(x, y, x + step_x / 2, y + step_y / 2, glass);
        }
      }
    }
  }

  void tree(double x, double foot) {
    const double top = foot - between(0.22, 0.46);
    rectangle(x - 0.011, top, x + 0.011, foot, {between(0.24, 0.37), between(0.18, 0.25), 0.14});
    foliage(x, top, between(0.06, 0.12));
  }

  void foliage(double x, double y, double radius) {
    const Color leaves = scale({between(0.16, 0.43), between(0.35, 0.55), between(0.1, 0.24)}, between(0.6, 1.3));
    for (int i = 0; i < 6; ++i) {
      const double size = radius * between(0.55, 1);
      ellipse(x + between(-radius, radius), y + between(-radius, radius) / 2, size, size * 0.8,
              scale(leaves, between(0.8, 1.2)));
    }
  }

  void street() {
    const double kerb = horizon_ + between(0.05, 0.11);
    const Color pavement = grey(0.43, 0.78);
    const Color asphalt = grey(0.18, 0.59);
    gradient(horizon_, kerb, pavement, scale(pavement, between(0.85, 1.1)));
    rectangle(0, kerb, width_, kerb + 0.012, scale(pavement, 0.65));
    gradient(kerb + 0.012, 1, asphalt, scale(asphalt, between(0.8, 1.25)));
    if (random_.chance(0.75)) {
      const Color mark = random_.chance(0.7) ? Color{0.88, 0.88, 0.87} : Color{0.88, 0.73, 0.2};
      const double y = between(kerb + 0.06, 0.98);
      const double length = between(0.09, 0.25);
      for (double x = between(-length, 0); x < width_; x += length * 2) rectangle(x, y, x + length, y + 0.017, mark);
    }
  }

  // Something in the colours of cars.
  void thing(double x, double foot) {
    const Color color = paint_color();
    const int kind = below(3);
    if (kind == 0) {  // a box or kiosk
      const double half = between(0.025, 0.11);
      const double height = between(0.05, 0.22);
      rectangle(x - half, foot - height, x + half, foot, color);
      rectangle(x - half, foot - height, x + half, foot - height * 0.8, scale(color, 0.75));
    } else if (kind == 1) {  // a pole, sometimes with a sign
      const double height = between(0.2, 0.5);
      rectangle(x - 0.007, foot - height, x + 0.007, foot, grey(0.2, 0.7));
      if (random_.chance(0.7)) ellipse(x, foot - height, 0.042, 0.042, color);
    } else {
      foliage(x, foot - 0.04, between(0.035, 0.07));
    }
  }

  void car() {
    const CarBody& body = kCarBodies[static_cast<std::size_t>(below(static_cast<int>(kCarBodies.size())))];
    const double length = std::min(width_ * between(0.58, 0.85), 2.0);
    const double height = length * body.height * between(0.9, 1.12);
    const double left = between(-length / 12, width_ - length + length / 12);
    const double lowest = std::min(0.98, horizon_ + 0.15 + height);
    const double ground = between(std::min(horizon_ + 0.15, lowest), lowest);
    const bool faces_right = random_.chance(0.5);
    const auto place = [&](int along) { return left + length * (faces_right ? along : 1000 - along) / 1000; };
    const auto polygon = [&](const std::vector<int>& corners, Color color, int label = kCar) {
      for (std::size_t i = 0; i < corners.size(); i += 2) {
        cairo_line_to(image_.cairo(), place(corners[i]), ground - height * corners[i + 1] / 1000);
      }
      cairo_close_path(image_.cairo());
      fill(color, label);
    };

    const double wheel = length * between(0.078, 0.095);
    ellipse_path(left + length / 2, ground - wheel / 4, length * 0.54, wheel * 0.67);
    cairo_set_source_rgba(image_.cairo(), 0, 0, 0, between(0.4, 0.75));  // the shadow
    cairo_fill(image_.cairo());

    const Color color = paint_color();
    polygon(body.outline, color);
    polygon({5, 180, 5, 330, 995, 330, 995, 180}, scale(color, between(0.6, 0.85)));
    polygon({120, 520, 120, 548, 780, 548, 780, 520}, scale(color, 0.7));
    const Color glass = random_.chance(0.6) ? Color{between(0.1, 0.24), between(0.13, 0.26), between(0.16, 0.31)}
                                            : Color{between(0.47, 0.75), between(0.59, 0.8), between(0.67, 0.86)};
    for (const auto& window : body.windows) polygon(window, glass, kWindow);
    polygon({502, 230, 502, 600, 508, 600, 508, 230}, scale(color, 0.55));
    polygon({965, 380, 965, 470, 993, 440, 996, 380}, {0.96, 0.94, 0.8});
    polygon({2, 400, 4, 480, 30, 480, 30, 400}, {0.75, 0.08, 0.1});
    const Color rim = grey(0.35, 0.84);
    const Color tyre = grey(0.09, 0.19);
    for (const int along : {185, 805}) {
      const double hub = ground - wheel;
      ellipse(place(along), hub, wheel, wheel, tyre, kWheel);
      ellipse(place(along), hub, wheel * 0.58, wheel * 0.58, rim, kWheel);
      ellipse(place(along), hub, wheel * 0.15, wheel * 0.15, tyre, kWheel);
    }
    if (random_.chance(0.5)) thing(left + length * between(0.05, 0.95), std::min(1.03, ground + between(0.02, 0.09)));
  }

  // Exposure, a gradient of light in each direction, and noise.
  torch::Tensor lit(const torch::Tensor& image) {
    const auto slope = [&](std::int64_t pixels) { return torch::linspace(-1, 1, pixels) * between(-0.25, 0.25); };
    const auto gain = slope(image.size(1)).view({-1, 1}) + slope(image.size(2)) + between(0.75, 1.12);
    const double strength = between(2, 9);
    const auto noise = torch::rand(image[0].sizes(), at::detail::createCPUGenerator(random_.seed())) * 2 - 1;
    return (image * gain + noise * strength).clamp(0, 255).to(torch::kByte);
  }

  Random random_;
  Drawing image_;
  Drawing mask_;
  const int classes_;
  double width_ = 0;
  double horizon_ = 0;  // the line where walls meet the pavement
};

}  // namespace

Scene draw_scene(std::uint64_t seed, int number, Size size, int classes) {
  if (size.width < 16 || size.height < 16) {
    throw std::invalid_argument("a scene of " + to_string(size) + " is too small; give at least 16x16");
  }
  if (classes > kWheel + 1) throw std::invalid_argument("a scene has 2 to 4 classes, not " + std::to_string(classes));
  return Painter(Random(seed, static_cast<std::uint64_t>(number)), size, classes).paint();
}

void write_scenes(const std::filesystem::path& folder, int count, Size size, std::uint64_t seed, int classes) {
  for (int i = 0; i < count; ++i) {
    const auto scene = draw_scene(seed, i, size, classes);
    std::filesystem::create_directories(folder / "imgs");
    std::filesystem::create_directories(folder / "masks");
    write_png(folder / "imgs" / absl::StrFormat("%04d.png", i), scene.image);
    write_png(folder / "masks" / absl::StrFormat("%04d_mask.png", i), paint_labels(scene.mask, classes));
  }
}

}  // namespace gpipe::examples::unet
