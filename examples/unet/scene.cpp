#include "examples/unet/data.h"

#include <torch/utils.h>

#include <stdexcept>

#include "absl/strings/str_format.h"
#include "examples/common/random.h"

namespace gpipe::examples::unet {

Scene draw_scene(std::uint64_t seed, int number, Size size, int classes) {
  constexpr int kCar = 1, kWindow = 2, kWheel = 3;
  if (classes > kWheel + 1) throw std::invalid_argument("a scene has 2 to 4 classes, not " + std::to_string(classes));
  const auto random = make_generator(seed, static_cast<std::uint64_t>(number));
  const auto between = [&](double low, double high) {
    return low + (high - low) * torch::rand({}, random).item<double>();
  };
  const auto color = [&](double low, double high) { return torch::rand({3, 1, 1}, random) * (high - low) + low; };
  const double width = static_cast<double>(size.width) / size.height;  // the unit is the height
  const auto x = torch::linspace(0, width, size.width).view({1, -1});
  const auto y = torch::linspace(0, 1, size.height).view({-1, 1});
  auto image = torch::empty({3, size.height, size.width});
  auto mask = torch::zeros({size.height, size.width}, torch::kByte);
  // Each shape covers what is below it, in both.
  const auto fill = [&](const torch::Tensor& where, const torch::Tensor& with, int label = 0) {
    image = torch::where(where, with, image);
    mask.masked_fill_(where, label < classes ? label : kCar);
  };
  const auto box = [&](double left, double right, double top, double bottom) {
    return (x >= left) & (x < right) & (y >= top) & (y < bottom);
  };

  const double horizon = between(0.4, 0.6);
  fill(y < horizon, color(0.5, 1));
  fill(y >= horizon, color(0.3, 0.6));
  for (int blocks = 0; blocks < 6; ++blocks) {
    const double left = between(-0.1, width), top = between(0.05, horizon);
    fill(box(left, left + between(0.05, 0.3), top, horizon + between(0, 0.1)), color(0, 1));
  }
  const double length = width * between(0.5, 0.8), height = length * between(0.15, 0.2);
  const double left = between(0, width - length), ground = between(horizon + 0.2, 0.95), middle = ground - height;
  const double rear = left + length * between(0.05, 0.2), front = rear + length * 0.65, wheel = height * 0.45;
  fill(box(left, left + length, middle, ground - wheel * 0.4) | box(rear, front, middle - height * 0.8, middle),
       color(0, 1), kCar);
  fill(box(rear + length * 0.05, front - length * 0.05, middle - height * 0.65, middle), color(0.1, 0.8), kWindow);
  for (const double hub : {left + length * 0.2, left + length * 0.8}) {
    fill((x - hub).square() + (y - ground + wheel).square() < wheel * wheel, color(0.05, 0.2), kWheel);
  }
  const auto noise = torch::randn(image.sizes(), random) * between(0.01, 0.04);
  return {((image + noise) * between(0.8, 1.1)).clamp(0, 1).mul(255).to(torch::kByte), mask};
}

void write_scenes(const std::filesystem::path& folder, int count, Size size, std::uint64_t seed, int classes) {
  std::filesystem::create_directories(folder / "imgs");
  std::filesystem::create_directories(folder / "masks");
  for (int i = 0; i < count; ++i) {
    const auto scene = draw_scene(seed, i, size, classes);
    write_png(folder / "imgs" / absl::StrFormat("%04d.png", i), scene.image);
    write_png(folder / "masks" / absl::StrFormat("%04d_mask.png", i), paint_labels(scene.mask, classes));
  }
}

}  // namespace gpipe::examples::unet
