#include "examples/resnet18_mnist/digits.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/common/files.h"

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
    for (std::size_t i = 4; i < header; ++i) {
      shape[i / 4 - 1] = shape[i / 4 - 1] << 8 | static_cast<std::uint8_t>(bytes[i]);
    }
    double announced = 1;  // may exceed 64 bits
    for (const auto size : shape) announced *= static_cast<double>(size);
    if (announced < 1 || static_cast<double>(bytes.size() - header) != announced) {
      throw std::runtime_error(
          absl::StrFormat("%d bytes after the header, which announces %.0f", bytes.size() - header, announced));
    }
    auto values = at::empty(shape, at::kByte);
    std::copy(bytes.begin() + static_cast<std::ptrdiff_t>(header), bytes.end(),
              values.mutable_data_ptr<std::uint8_t>());
    return values;
  });
}

}  // namespace

LabelledImages read_idx(const std::filesystem::path& folder, const std::string& part) {
  const auto path_of_labels = folder / (part + "-labels-idx1-ubyte");
  const LabelledImages set{read(folder / (part + "-images-idx3-ubyte"), 3), read(path_of_labels, 1)};
  if (set.images.size(0) != set.labels.size(0)) {
    throw std::runtime_error(absl::StrCat(folder.string(), " has ", set.images.size(0), " images and ",
                                          set.labels.size(0), " labels of ", part));
  }
  if (const auto largest = set.labels.max().item<int>(); largest >= 10) {
    throw std::runtime_error(absl::StrCat(path_of_labels.string(), ": a label is ", largest, "; it must be below 10"));
  }
  return set;
}

}  // namespace gpipe::examples::mnist
