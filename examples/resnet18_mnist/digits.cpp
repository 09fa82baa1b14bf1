#include "examples/resnet18_mnist/digits.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/vision.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/common/files.h"
#include "examples/common/random.h"

namespace gpipe::examples::mnist {
namespace {

// A header of two zero bytes, the type (8 for bytes), the number of dimensions, and four bytes for each; then the bytes.
at::Tensor read(const std::filesystem::path& path, std::size_t dimensions) {
  return with_name(path, [&] {
    if (!std::filesystem::exists(path) && std::filesystem::exists(path.string() + ".gz")) {
      throw std::runtime_error("missing, but there is a .gz file; run gunzip on it");
    }
    const auto bytes = read_file(path);
    const auto header = 4 * (1 + dimensions);
    if (bytes.size() < header || bytes.substr(0, 4) != std::string({0, 0, 8, static_cast<char>(dimensions)})) {
      throw std::runtime_error(absl::StrCat("not an uncompressed IDX file of bytes in ", dimensions, " dimensions"));
    }
    std::vector<std::int64_t> shape(dimensions, 0);
    std::size_t announced = 1;
    for (std::size_t i = 4; i < header; ++i)
      shape[i / 4 - 1] = shape[i / 4 - 1] << 8 | static_cast<std::uint8_t>(bytes[i]);
    for (const auto size : shape) {
      if (size < 1 || announced > bytes.size()) throw std::runtime_error("its header announces an impossible size");
      announced *= static_cast<std::size_t>(size);
    }
    if (bytes.size() - header != announced) {
      throw std::runtime_error(
          absl::StrCat(bytes.size() - header, " bytes after the header, which announces ", announced));
    }
    auto values = at::empty(shape, at::kByte);
    std::copy(bytes.begin() + static_cast<std::ptrdiff_t>(header), bytes.end(),
              values.mutable_data_ptr<std::uint8_t>());
    return values;
  });
}

// Rows of three pixels, from the top, as binary numbers.
constexpr std::array<std::array<int, 5>, 10> kShapes{{{7, 5, 5, 5, 7},
                                                      {2, 6, 2, 2, 7},
                                                      {7, 1, 7, 4, 7},
                                                      {7, 1, 7, 1, 7},
                                                      {5, 5, 7, 1, 1},
                                                      {7, 4, 7, 1, 7},
                                                      {7, 4, 7, 5, 7},
                                                      {7, 1, 2, 2, 2},
                                                      {7, 5, 7, 5, 7},
                                                      {7, 5, 7, 1, 7}}};

}  // namespace

LabelledImages read_idx(const std::filesystem::path& folder, const std::string& part) {
  const auto path_of_labels = folder / (part + "-labels-idx1-ubyte");
  const LabelledImages set{read(folder / (part + "-images-idx3-ubyte"), 3), read(path_of_labels, 1)};
  if (set.images.size(0) != set.labels.size(0)) {
    throw std::runtime_error(absl::StrCat(folder.string(), " has ", set.images.size(0), " images and ",
                                          set.labels.size(0), " labels of ", part));
  }
  const auto largest = set.labels.max().item<int>();
  if (largest < 10) return set;
  throw std::runtime_error(absl::StrCat(path_of_labels.string(), ": a label is ", largest, "; it must be below 10"));
}

LabelledImages draw_digits(int count, std::uint64_t seed) {
  namespace F = torch::nn::functional;
  auto shapes = at::zeros({10, 1, 7, 5});  // with a border
  for (int digit = 0; digit < 10; ++digit) {
    for (int pixel = 0; pixel < 15; ++pixel) {
      const bool lit = (kShapes[digit][pixel / 3] >> (2 - pixel % 3) & 1) != 0;
      shapes[digit][0][1 + pixel / 3][1 + pixel % 3] = lit ? 1 : 0;
    }
  }
  const auto generator = at::detail::createCPUGenerator(Random(seed).seed());
  const auto labels = at::randint(10, {count}, generator, at::kLong);
  const auto between = [&](double low, double high) { return at::rand({count}, generator) * (high - low) + low; };
  // From the picture's coordinates, -1 to 1, to those of the shape.
  const auto zero = at::zeros({count});
  const auto x = at::stack({between(1, 1.8), between(-0.4, 0.6), between(-0.4, 0.4)}, 1);
  const auto y = at::stack({zero, between(1, 1.6), between(-0.4, 0.4)}, 1);
  const auto grid = F::affine_grid(at::stack({x, y}, 1), {count, 1, 28, 28}, /*align_corners=*/false);
  const auto drawn =
      F::grid_sample(shapes.index_select(0, labels), grid, F::GridSampleFuncOptions().align_corners(false));
  const auto light = between(0.6, 1).view({-1, 1, 1}), noise = at::randn({count, 28, 28}, generator) * 0.08;
  return {(drawn.squeeze(1) * light + noise).clamp(0, 1).mul(255).to(at::kByte), labels.to(at::kByte)};
}

}  // namespace gpipe::examples::mnist
