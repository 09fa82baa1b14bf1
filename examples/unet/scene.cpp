#include "examples/unet/scene.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/common/canvas.h"
#include "examples/unet/car_body.h"

namespace gpipe::examples::unet {
namespace {

constexpr Label kCar = 1;
constexpr Label kWindow = 2;
constexpr Label kWheel = 3;

class Painter {
 public:
  Painter(Random& random, Size size, int classes) : random_(random), canvas_(size), classes_(classes) {}

  Scene paint() {
    horizon_ = between(4600, 5800);
    sky();
    buildings();
    trees();
    street();
    clutter();
    car();
    if (random_.chance(50)) occluder();
    light();
    return {canvas_.image(), canvas_.mask()};
  }

 private:
  int between(int low, int high) { return random_.between(low, high); }
  // A random horizontal place.
  int across() { return between(0, canvas_.width()); }

  Label label(Label part) const { return part < classes_ ? part : kCar; }

  Color grey(int low, int high) {
    const int value = between(low, high);
    return {value + between(-6, 6), value + between(-6, 6), value + between(-6, 6)};
  }

  Color paint_color() {
    static constexpr Color kPaints[] = {{24, 24, 28},    {236, 236, 236}, {180, 183, 188}, {104, 107, 112},
                                        {178, 26, 32},   {96, 18, 24},    {32, 62, 150},   {120, 165, 210},
                                        {32, 92, 52},    {230, 190, 36},  {222, 112, 28},  {100, 70, 46},
                                        {206, 190, 154}, {18, 120, 130}};
    const Color base = kPaints[between(0, static_cast<int>(std::size(kPaints)) - 1)];
    return {base.red + between(-14, 14), base.green + between(-14, 14), base.blue + between(-14, 14)};
  }

  Color leaves() {
    const int strength = between(60, 130);
    return scale({between(40, 110), between(90, 140), between(25, 60)}, strength);
  }

  void sky() {
    static constexpr Color kSkies[][2] = {{{90, 145, 215}, {190, 215, 240}},
                                          {{165, 170, 178}, {215, 217, 220}},
                                          {{80, 80, 130}, {240, 165, 105}},
                                          {{25, 28, 48}, {70, 75, 105}}};
    const auto& [top, bottom] = kSkies[between(0, 3)];
    canvas_.gradient(0, horizon_, top, bottom);
  }

  void buildings() {
    for (int left = between(-1500, 0); left < canvas_.width();) {
      const int right = left + between(1500, 4500);
      if (random_.chance(85)) building(left, right);
      left = right + (random_.chance(30) ? between(200, 1800) : 0);
    }
  }

  void building(int left, int right) {
    const int top = between(-500, horizon_ - 1500);
    const Color wall = random_.chance(50) ? grey(60, 225) : paint_color();
    canvas_.rectangle({left, top}, {right, horizon_}, wall);
    const bool lit = random_.chance(50);
    const Color glass = lit ? mix(wall, {250, 235, 180}, 60) : scale(wall, 55);
    const int step_x = between(500, 900);
    const int step_y = between(600, 1000);
    for (int y = top + 300; y + step_y / 2 < horizon_ - 200; y += step_y) {
      for (int x = left + 200; x + step_x / 2 < right - 100; x += step_x) {
        canvas_.rectangle({x, y}, {x + step_x / 2, y + step_y / 2}, glass);
      }
    }
  }

  void trees() {
    for (int count = between(0, 3); count > 0; --count) {
      const Point foot = {across(), horizon_ + between(0, 300)};
      const int height = between(2200, 4600);
      canvas_.rectangle({foot.x - 110, foot.y - height}, {foot.x + 110, foot.y},
                        {between(60, 95), between(45, 65), 35});
      foliage({foot.x, foot.y - height}, between(600, 1200));
    }
  }

  void foliage(Point center, int radius) {
    const Color color = leaves();
    for (int i = 0; i < 6; ++i) {
      const Point at = {center.x + between(-radius, radius), center.y + between(-radius, radius) / 2};
      const int size = radius * between(55, 100) / 100;
      canvas_.ellipse(at, size, size * 4 / 5, scale(color, between(80, 120)));
    }
  }

  void street() {
    const int kerb = horizon_ + between(500, 1100);
    const Color pavement = grey(110, 200);
    canvas_.gradient(horizon_, kerb, pavement, scale(pavement, between(85, 110)));
    canvas_.rectangle({0, kerb}, {canvas_.width(), kerb + 120}, scale(pavement, 65));
    const Color asphalt = grey(45, 150);
    canvas_.gradient(kerb + 120, kCanvasHeight, asphalt, scale(asphalt, between(80, 125)));
    if (random_.chance(75)) {
      const Color mark = random_.chance(70) ? Color{225, 225, 222} : Color{225, 185, 50};
      const int y = between(kerb + 600, kCanvasHeight - 200);
      const int length = between(900, 2500);
      for (int x = between(-length, 0); x < canvas_.width(); x += length * 2) {
        canvas_.rectangle({x, y}, {x + length, y + 170}, mark);
      }
    }
    for (int count = between(0, 3); count > 0; --count) {
      const Point patch = {across(), between(kerb + 500, kCanvasHeight)};
      const int size = between(300, 1400);
      canvas_.ellipse(patch, size, size / 4, scale(asphalt, between(70, 130)));
    }
  }

  // Things behind the car, on the pavement and the far side of the road.
  void clutter() {
    for (int count = between(1, 5); count > 0; --count) {
      const Point foot = {across(), horizon_ + between(100, 1300)};
      thing(foot, paint_color());
    }
  }

  void thing(Point foot, Color color) {
    switch (between(0, 3)) {
      case 0: {  // a box or kiosk
        const int half = between(250, 1100);
        const int height = between(500, 2200);
        canvas_.rectangle({foot.x - half, foot.y - height}, {foot.x + half, foot.y}, color);
        canvas_.rectangle({foot.x - half, foot.y - height}, {foot.x + half, foot.y - height * 4 / 5}, scale(color, 75));
        break;
      }
      case 1: {  // a pole, sometimes with a sign
        const int height = between(2000, 5000);
        canvas_.rectangle({foot.x - 70, foot.y - height}, {foot.x + 70, foot.y}, grey(50, 180));
        if (random_.chance(70)) canvas_.ellipse({foot.x, foot.y - height}, 420, 420, color);
        break;
      }
      case 2: {  // a barrel or a bag
        const int half = between(250, 600);
        canvas_.ellipse({foot.x, foot.y - half}, half, half, color);
        canvas_.ellipse({foot.x, foot.y - half * 3 / 2}, half * 2 / 3, half / 3, scale(color, 130));
        break;
      }
      default:
        foliage({foot.x, foot.y - 400}, between(350, 700));
    }
  }

  void car() {
    const CarBody& body = car_bodies()[static_cast<size_t>(between(0, static_cast<int>(car_bodies().size()) - 1))];
    const int length = std::min(canvas_.width() * between(58, 85) / 100, 20000);
    const int height = length * body.height / 1000 * between(90, 112) / 100;
    const int left = between(-length / 12, canvas_.width() - length + length / 12);
    const int lowest = std::min(9800, horizon_ + 1500 + height);
    const int ground = between(std::min(horizon_ + 1500, lowest), lowest);
    const bool faces_right = random_.chance(50);
    const auto at = [&](Point point) {
      const int along = faces_right ? point.x : 1000 - point.x;
      return Point{left + length * along / 1000, ground - height * point.y / 1000};
    };
    const auto fill = [&](std::vector<Point> corners, Color color, Label part = kCar) {
      for (Point& corner : corners) corner = at(corner);
      canvas_.polygon(corners, color, label(part));
    };

    const int wheel = length * between(78, 95) / 1000;
    canvas_.shadow({left + length / 2, ground - wheel / 4}, length * 54 / 100, wheel * 2 / 3, between(25, 60));

    const Color color = paint_color();
    fill(body.outline, color);
    fill({{5, 180}, {5, 330}, {995, 330}, {995, 180}}, scale(color, between(60, 85)));
    fill({{120, 520}, {120, 548}, {780, 548}, {780, 520}}, scale(color, 70));
    const Color glass = random_.chance(60) ? Color{between(25, 60), between(32, 66), between(42, 80)}
                                           : Color{between(120, 190), between(150, 205), between(170, 220)};
    for (const auto& window : body.windows) fill(window, glass, kWindow);
    fill({{502, 230}, {502, 600}, {508, 600}, {508, 230}}, scale(color, 55));
    fill({{965, 380}, {965, 470}, {993, 440}, {996, 380}}, {245, 240, 205});
    fill({{2, 400}, {4, 480}, {30, 480}, {30, 400}}, {190, 20, 25});

    const Color rim = grey(90, 215);
    const Color tyre = grey(22, 48);
    for (const int along : {185, 805}) {
      const Point foot = at({along, 0});
      const Point hub = {foot.x, ground - wheel};
      canvas_.ellipse(hub, wheel, wheel, tyre, label(kWheel));
      canvas_.ellipse(hub, wheel * 58 / 100, wheel * 58 / 100, rim, label(kWheel));
      canvas_.ellipse(hub, wheel * 15 / 100, wheel * 15 / 100, tyre, label(kWheel));
    }
    car_center_ = {left + length / 2, ground - height / 2};
    car_ground_ = ground;
    car_length_ = length;
  }

  // A thing in front of the car.
  void occluder() {
    const int x = car_center_.x + between(-car_length_ * 45 / 100, car_length_ * 45 / 100);
    const int foot = std::min(kCanvasHeight + 300, car_ground_ + between(200, 900));
    switch (between(0, 2)) {
      case 0: {  // a post
        const int half = between(110, 260);
        const Color color = random_.chance(50) ? grey(50, 190) : paint_color();
        canvas_.rectangle({x - half, random_.chance(50) ? -1 : car_center_.y - 2500}, {x + half, foot}, color);
        break;
      }
      case 1:
        foliage({x, foot - 500}, between(500, 1000));
        break;
      default: {  // a box
        const int half = between(300, 900);
        const int height = between(700, 1800);
        const Color color = paint_color();
        canvas_.rectangle({x - half, foot - height}, {x + half, foot}, color);
        canvas_.rectangle({x - half, foot - height / 2}, {x + half, foot - height / 3}, scale(color, 70));
      }
    }
  }

  // Exposure, a gradient of light in each direction, and noise.
  void light() {
    const int exposure = between(75, 112);
    const int slope_x = between(-25, 25);
    const int slope_y = between(-20, 20);
    const int noise = between(2, 9);
    Image& image = canvas_.image();
    for (int y = 0; y < image.height; ++y) {
      for (int x = 0; x < image.width; ++x) {
        const int gain =
            exposure * 100 + slope_x * (200 * x / image.width - 100) + slope_y * (200 * y / image.height - 100);
        const int grain = between(-noise, noise);
        uint8_t* rgb = image.at(x, y);
        for (int c = 0; c < 3; ++c) rgb[c] = static_cast<uint8_t>(std::clamp(rgb[c] * gain / 10000 + grain, 0, 255));
      }
    }
  }

  Random& random_;
  Canvas canvas_;
  const int classes_;
  int horizon_ = 0;  // the line where walls meet the pavement
  Point car_center_;
  int car_ground_ = 0;
  int car_length_ = 0;
};

}  // namespace

void check_scene(Size size, int classes) {
  if (size.width < 16 || size.height < 16) {
    throw std::invalid_argument("a scene of " + to_string(size) + " is too small; give at least 16x16");
  }
  if (classes < 2 || classes > kSceneClasses) {
    throw std::invalid_argument("a scene has 2 to " + std::to_string(kSceneClasses) + " classes, not " +
                                std::to_string(classes));
  }
}

Scene draw_scene(Random& random, Size size, int classes) {
  check_scene(size, classes);
  return Painter(random, size, classes).paint();
}

}  // namespace gpipe::examples::unet
