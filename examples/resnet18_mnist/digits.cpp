#include "examples/resnet18_mnist/digits.h"

#include <torch/utils.h>

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <cmath>

#include "absl/strings/str_format.h"
#include "examples/common/random.h"

namespace gpipe::examples::mnist {
namespace {

at::Tensor draw_digit(Random random, int digit) {
  constexpr std::array<const char*, 3> kFonts = {"sans-serif", "serif", "monospace"};
  Drawing drawing({28, 28}, CAIRO_FORMAT_A8);
  auto* cairo = drawing.cairo();
  const auto slant = random.chance(0.3) ? CAIRO_FONT_SLANT_ITALIC : CAIRO_FONT_SLANT_NORMAL;
  cairo_select_font_face(cairo, kFonts[random.below(3)], slant, CAIRO_FONT_WEIGHT_NORMAL);
  cairo_set_font_size(cairo, 100);
  const std::string text = std::to_string(digit);
  cairo_text_extents_t extents;
  cairo_text_extents(cairo, text.c_str(), &extents);

  const double height = random.between(13, 22);
  cairo_translate(cairo, 14 + random.between(-3, 3), 14 + random.between(-3, 3));
  cairo_rotate(cairo, random.between(-0.3, 0.3));
  const cairo_matrix_t shear{1, 0, random.between(-0.35, 0.2), 1, 0, 0};
  cairo_transform(cairo, &shear);
  cairo_scale(cairo, random.between(0.8, 1.3) * height / extents.height, height / extents.height);
  cairo_move_to(cairo, -extents.x_bearing - extents.width / 2, -extents.y_bearing - extents.height / 2);
  cairo_text_path(cairo, text.c_str());
  cairo_set_line_width(cairo, random.between(1, 14));
  cairo_fill_preserve(cairo);
  cairo_stroke(cairo);

  const double paper = random.between(0, 50);
  const double ink = random.between(140, 255);
  const auto noise = at::rand({28, 28}, at::detail::createCPUGenerator(random.seed())) * 2 - 1;
  const auto image = drawing.image() * ((ink - paper) / 255) + noise * random.between(0, 45) + paper;
  return image.clamp(0, 255).to(at::kByte);
}

}  // namespace

LabelledImages draw_digits(int count, std::uint64_t seed, Part part) {
  const std::uint64_t first = part == Part::kTraining ? 0 : std::uint64_t{1} << 32;
  std::vector<at::Tensor> images;
  std::vector<std::uint8_t> labels;
  for (int i = 0; i < count; ++i) {
    Random random(seed, first + static_cast<std::uint64_t>(i));
    labels.push_back(static_cast<std::uint8_t>(random.below(10)));
    images.push_back(draw_digit(random, labels.back()));
  }
  return {at::stack(images), torch::tensor(labels, at::kByte)};
}

Drawing draw_confusion(const std::vector<std::int64_t>& counts, int classes) {
  constexpr int kCell = 49, kLeft = 96, kTop = 88, kBorder = 12;
  constexpr Color kLight{1, 1, 1}, kPaper{0.19, 0.19, 0.19};
  const int side = classes * kCell;
  const Size size{kLeft + side + kBorder, kTop + side + kBorder};
  Drawing drawing(size);
  drawing.rectangle(0, 0, size.width, size.height, kPaper);
  const auto table = torch::tensor(counts, torch::kDouble).view({classes, classes});
  const auto accuracy = table.trace() / table.sum().clamp_min(1);
  const auto shares = table / table.sum(1, /*keepdim=*/true).clamp_min(1);
  drawing.color(kLight);
  drawing.text(absl::StrFormat("accuracy %.2f %%", 100 * accuracy.item<double>()), size.width / 2.0, 18, 18);
  drawing.text("predicted", kLeft + side / 2.0, 46, 18);
  drawing.text("true", 32, kTop + side / 2.0, 18);
  for (int row = 0; row < classes; ++row) {
    const double top = kTop + row * kCell;
    drawing.color(kLight);
    drawing.text(std::to_string(row), kLeft + (row + 0.5) * kCell, kTop - 14, 18);
    drawing.text(std::to_string(row), kLeft - 18, top + kCell / 2.0, 18);
    for (int column = 0; column < classes; ++column) {
      const double left = kLeft + column * kCell;
      const double grey = std::sqrt(shares[row][column].item<double>());  // the root makes rare mistakes visible
      drawing.rectangle(left, top, kCell - 1, kCell - 1, {grey, grey, grey});
      drawing.color(grey > 0.46 ? Color() : kLight);
      const auto count = counts[row * classes + column];
      if (count > 0) drawing.text(std::to_string(count), left + kCell / 2.0, top + kCell / 2.0, 14);
    }
  }
  return drawing;
}

}  // namespace gpipe::examples::mnist
