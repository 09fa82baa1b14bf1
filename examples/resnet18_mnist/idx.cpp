#include "examples/resnet18_mnist/idx.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "examples/common/files.h"

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

}  // namespace

IdxFiles training_files(const fs::path& directory) {
  return {directory / "train-images-idx3-ubyte", directory / "train-labels-idx1-ubyte"};
}

IdxFiles test_files(const fs::path& directory) {
  return {directory / "t10k-images-idx3-ubyte", directory / "t10k-labels-idx1-ubyte"};
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

}  // namespace gpipe::examples::mnist
