#include "examples/unet/data.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/utils.h>

#include <algorithm>
#include <stdexcept>

#include "absl/strings/str_format.h"
#include "examples/common/random.h"

namespace gpipe::examples::unet {
namespace {

constexpr int kCar = 1, kWindow = 2, kWheel = 3;

}  // namespace

Scene draw_scene(std::uint64_t seed, int number, Size size, int classes) {
  if (classes > kWheel + 1) throw std::invalid_argument("a scene has 2 to 4 classes, not " + std::to_string(classes));
  Random random(seed, static_cast<std::uint64_t>(number));
  const auto generator = at::detail::createCPUGenerator(random.seed());
  const double width = static_cast<double>(size.width) / size.height;  // the unit is the height
  const auto x = torch::linspace(0, width, size.width).view({1, -1});
  const auto y = torch::linspace(0, 1, size.height).view({-1, 1});
  auto image = torch::empty({3, size.height, size.width});
  auto mask = torch::zeros({size.height, size.width}, torch::kByte);
  // Each shape covers what is below it, in both.
  const auto fill = [&](const torch::Tensor& where, const torch::Tensor& color, int label = 0) {
    image = torch::where(where, color.view({3, 1, 1}), image);
    mask.masked_fill_(where, label < classes ? label : kCar);
  };
  const auto box = [&](const auto& left, const auto& right, double top, double bottom) {
    return (x >= left) & (x < right) & (y >= top) & (y < bottom);
  };
  const auto any_color = [&](double low, double high) { return torch::rand({3}, generator) * (high - low) + low; };

  const double horizon = random.between(0.4, 0.6);
  fill(y < horizon, any_color(0.5, 1));
  fill(y >= horizon, any_color(0.3, 0.6));
  for (int blocks = 3 + random.below(6); blocks > 0; --blocks) {
    const double left = random.between(-0.1, width), top = random.between(0.05, horizon);
    fill(box(left, left + random.between(0.05, 0.3), top, horizon + random.between(0, 0.1)), any_color(0, 1));
  }

  const double length = width * random.between(0.5, 0.8), height = length * random.between(0.15, 0.2);
  const double left = random.between(0, width - length), ground = random.between(horizon + 0.2, 0.95);
  const bool faces_right = random.chance(0.5);
  const auto along = [&](double part) { return left + length * (faces_right ? part : 1 - part); };
  const double wheel = height * random.between(0.4, 0.5), middle = ground - height, roof = middle - height * 0.8;
  // The slopes of the cabin meet its roof after a part of the length.
  const auto slope = (y - middle).abs() / (height * 0.8) * length * random.between(0.05, 0.15);
  const auto cabin = [&](double rear, double front, double top) {
    const double low = std::min(along(rear), along(front)), high = std::max(along(rear), along(front));
    return box(low + slope, high - slope, top, middle);
  };
  fill(box(left, left + length, middle, ground - wheel * 0.4) | cabin(0.1, 0.75, roof), any_color(0, 1), kCar);
  fill(cabin(0.15, 0.42, roof + height * 0.15) | cabin(0.45, 0.7, roof + height * 0.15), any_color(0.1, 0.8), kWindow);
  for (const double hub : {0.2, 0.8}) {
    const auto distance = ((x - along(hub)).square() + (y - (ground - wheel)).square()).sqrt();
    fill(distance < wheel, torch::full({3}, 0.1), kWheel);
    fill(distance < wheel / 2, torch::full({3}, random.between(0.4, 0.8)), kWheel);
  }
  const auto noise = torch::randn(image.sizes(), generator) * random.between(0.01, 0.04);
  return {((image + noise) * random.between(0.8, 1.1)).clamp(0, 1).mul(255).to(torch::kByte), mask};
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
