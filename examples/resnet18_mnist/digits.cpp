#include "examples/resnet18_mnist/digits.h"

#include <torch/utils.h>

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "absl/strings/str_format.h"
#include "examples/common/files.h"
#include "examples/common/random.h"

namespace gpipe::examples::mnist {
namespace {

namespace fs = std::filesystem;

// Two zero bytes, the type (8 for bytes), the number of dimensions.
constexpr std::uint32_t kImagesMagic = 0x00000803;
constexpr std::uint32_t kLabelsMagic = 0x00000801;
constexpr std::int64_t kLargestSide = 4096;

std::uint32_t big_endian(const std::string& bytes, std::size_t at) {
  std::uint32_t value = 0;
  for (std::size_t i = at; i < at + 4; ++i) value = value << 8 | static_cast<std::uint8_t>(bytes[i]);
  return value;
}

// Returns the dimensions. Errors: std::runtime_error for a file of another kind or length.
std::vector<std::int64_t> read_header(const fs::path& path, std::uint32_t magic) {
  const std::size_t dimensions = magic & 0xff;
  const std::size_t header_size = 4 * (1 + dimensions);
  const auto header = read_file(path, header_size);
  if (header.empty()) throw std::runtime_error("the file is empty");
  if (header.starts_with("\x1f\x8b")) throw std::runtime_error("compressed; run gunzip on it");
  if (header.size() >= 4 && big_endian(header, 0) != magic) {
    throw std::runtime_error(absl::StrFormat("not an IDX file of %s: it starts with 0x%08x instead of 0x%08x",
                                             magic == kImagesMagic ? "images" : "labels", big_endian(header, 0),
                                             magic));
  }
  if (header.size() < header_size) {
    throw std::runtime_error(
        absl::StrFormat("truncated: %d bytes, but the header alone has %d", header.size(), header_size));
  }
  std::vector<std::int64_t> shape;
  std::uint64_t announced = 1;
  for (std::size_t i = 1; i <= dimensions; ++i) {
    shape.push_back(big_endian(header, 4 * i));
    announced *= static_cast<std::uint64_t>(shape.back());
    if (i > 1 && (shape.back() < 1 || shape.back() > kLargestSide)) {
      throw std::runtime_error(
          absl::StrFormat("images with a side of %d pixels; 1 to %d are supported", shape.back(), kLargestSide));
    }
  }
  if (shape[0] == 0) throw std::runtime_error("the file has no items");
  const auto found = fs::file_size(path) - header_size;
  if (found == announced) return shape;
  throw std::runtime_error(absl::StrFormat("%s: %d bytes after the header, which announces %d",
                                           found < announced ? "truncated" : "too long", found, announced));
}

at::Tensor read(const fs::path& path, std::uint32_t magic) {
  if (const auto packed = path.string() + ".gz"; !fs::exists(path) && fs::exists(packed)) {
    throw std::runtime_error(path.string() + ": missing, but " + packed + " exists; run gunzip on it");
  }
  return with_name(path, [&] {
    const auto shape = read_header(path, magic);
    const auto bytes = read_file(path);
    auto values = at::empty(shape, at::kByte);
    std::copy(bytes.end() - values.numel(), bytes.end(), values.mutable_data_ptr<std::uint8_t>());
    return values;
  });
}

void write(const fs::path& path, const at::Tensor& values) {
  std::string bytes = {0, 0, 8, static_cast<char>(values.dim())};
  for (const auto size : values.sizes()) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(size >> shift));
  }
  const auto packed = values.contiguous();
  const auto* data = packed.const_data_ptr<std::uint8_t>();
  write_file(path, bytes.append(data, data + packed.numel()));
}

// Moves each point of the path along smooth waves, as an unsteady hand does.
void bend_path(cairo_t* cairo, Random& random) {
  std::array<double, 4> wave{};
  for (double& number : wave) number = random.between(0, 1);
  auto* path = cairo_copy_path_flat(cairo);
  cairo_new_path(cairo);
  for (int i = 0; i < path->num_data; i += path->data[i].header.length) {
    auto* point = &path->data[i + 1].point;
    if (path->data[i].header.type == CAIRO_PATH_CLOSE_PATH) continue;
    const double x = point->x, y = point->y;
    point->x += 9 * wave[0] * std::sin(0.06 * y + 6 * wave[1]);
    point->y += 9 * wave[2] * std::sin(0.06 * x + 6 * wave[3]);
  }
  cairo_append_path(cairo, path);
  cairo_path_destroy(path);
}

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
  bend_path(cairo, random);
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

IdxFiles files_of(Part part, const fs::path& directory) {
  const std::string name = part == Part::kTraining ? "train" : "t10k";
  return {directory / (name + "-images-idx3-ubyte"), directory / (name + "-labels-idx1-ubyte")};
}

LabelledImages read_idx(const IdxFiles& files, int classes) {
  const LabelledImages set{read(files.images, kImagesMagic), read(files.labels, kLabelsMagic)};
  const auto labels = set.labels.size(0);
  if (set.images.size(0) != labels) {
    throw std::runtime_error(absl::StrFormat("%s has %d images, but %s has %d labels", files.images.string(),
                                             set.images.size(0), files.labels.string(), labels));
  }
  const auto* label = set.labels.const_data_ptr<std::uint8_t>();
  const auto* wrong = std::find_if(label, label + labels, [=](int value) { return value >= classes; });
  if (wrong == label + labels) return set;
  throw std::runtime_error(absl::StrFormat("%s: label %d is %d; it must be below %d", files.labels.string(),
                                           wrong - label, *wrong, classes));
}

void write_idx(const IdxFiles& files, const LabelledImages& set) {
  write(files.images, set.images);
  write(files.labels, set.labels);
}

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
