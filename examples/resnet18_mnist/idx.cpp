#include "examples/resnet18_mnist/idx.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "examples/common/files.h"

namespace gpipe::examples::mnist {
namespace {

namespace fs = std::filesystem;

// Two zero bytes, the type (8: bytes), the number of dimensions.
constexpr uint32_t kImagesMagic = 0x00000803;
constexpr uint32_t kLabelsMagic = 0x00000801;
constexpr uint32_t kLargestSide = 4096;

struct Idx {
  std::vector<uint32_t> dimensions;
  std::vector<uint8_t> bytes;
};

std::vector<uint8_t> read_file(const fs::path& path) {
  const fs::path compressed = path.string() + ".gz";
  if (!fs::exists(path) && fs::exists(compressed)) {
    throw std::runtime_error("missing, but " + compressed.string() + " is there; run gunzip on it");
  }
  if (fs::is_directory(path)) throw std::runtime_error("a directory");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot be opened: " + std::generic_category().message(errno));
  std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) throw std::runtime_error("cannot be read");
  return bytes;
}

uint32_t big_endian(const std::vector<uint8_t>& bytes, size_t word) {
  const uint8_t* at = bytes.data() + 4 * word;
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
}

void append_big_endian(std::vector<uint8_t>& bytes, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<uint8_t>(value >> shift));
}

Idx parse(std::vector<uint8_t> bytes, uint32_t magic) {
  if (bytes.empty()) throw std::runtime_error("the file is empty");
  if (bytes.size() >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b) {
    throw std::runtime_error("compressed; run gunzip on it");
  }
  const size_t dimensions = magic & 0xff;
  const size_t header = 4 * (1 + dimensions);
  if (bytes.size() >= 4 && big_endian(bytes, 0) != magic) {
    throw std::runtime_error(absl::StrFormat("no IDX file of %s: it starts with 0x%08x instead of 0x%08x",
                                             magic == kImagesMagic ? "images" : "labels", big_endian(bytes, 0), magic));
  }
  if (bytes.size() < header) {
    throw std::runtime_error(absl::StrFormat("cut short: %d bytes, but the header alone has %d", bytes.size(), header));
  }
  Idx idx;
  for (size_t i = 1; i <= dimensions; ++i) idx.dimensions.push_back(big_endian(bytes, i));
  if (idx.dimensions[0] == 0) throw std::runtime_error("it holds no items");
  uint64_t expected = idx.dimensions[0];
  for (size_t i = 1; i < dimensions; ++i) {
    if (idx.dimensions[i] < 1 || idx.dimensions[i] > kLargestSide) {
      throw std::runtime_error(absl::StrFormat("images of %d rows and %d columns; 1 to %d are supported",
                                               idx.dimensions[1], idx.dimensions[2], kLargestSide));
    }
    expected *= idx.dimensions[i];
  }
  if (bytes.size() - header != expected) {
    throw std::runtime_error(absl::StrFormat("%s: %d bytes after the header, which says %d",
                                             bytes.size() - header < expected ? "cut short" : "too long",
                                             bytes.size() - header, expected));
  }
  idx.bytes = std::move(bytes);
  idx.bytes.erase(idx.bytes.begin(), idx.bytes.begin() + static_cast<std::ptrdiff_t>(header));
  return idx;
}

Idx read(const fs::path& path, uint32_t magic) {
  try {
    return parse(read_file(path), magic);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path.string() + ": " + error.what());
  }
}

}  // namespace

IdxFiles training_files(const fs::path& directory) {
  return {directory / "train-images-idx3-ubyte", directory / "train-labels-idx1-ubyte"};
}

IdxFiles test_files(const fs::path& directory) {
  return {directory / "t10k-images-idx3-ubyte", directory / "t10k-labels-idx1-ubyte"};
}

LabelledImages read_idx(const IdxFiles& files, int classes) {
  Idx images = read(files.images, kImagesMagic);
  Idx labels = read(files.labels, kLabelsMagic);
  if (images.dimensions[0] != labels.dimensions[0]) {
    throw std::runtime_error(absl::StrFormat("%s holds %d images, but %s %d labels", files.images.string(),
                                             images.dimensions[0], files.labels.string(), labels.dimensions[0]));
  }
  const auto wrong =
      std::find_if(labels.bytes.begin(), labels.bytes.end(), [=](int label) { return label >= classes; });
  if (wrong != labels.bytes.end()) {
    throw std::runtime_error(absl::StrFormat("%s: label %d is %d; it must be below %d", files.labels.string(),
                                             wrong - labels.bytes.begin(), *wrong, classes));
  }
  const Size size{static_cast<int>(images.dimensions[2]), static_cast<int>(images.dimensions[1])};
  return {size, std::move(images.bytes), std::move(labels.bytes)};
}

void write_idx(const IdxFiles& files, const LabelledImages& set) {
  const auto image_bytes = static_cast<size_t>(set.size.width) * static_cast<size_t>(set.size.height);
  if (set.count() == 0 || image_bytes == 0 || set.pixels.size() != set.count() * image_bytes) {
    throw std::invalid_argument(
        absl::StrFormat("%d pixels are not %d images of %s", set.pixels.size(), set.count(), to_string(set.size)));
  }
  std::vector<uint8_t> bytes;
  bytes.reserve(set.pixels.size() + 16);
  append_big_endian(bytes, kImagesMagic);
  append_big_endian(bytes, static_cast<uint32_t>(set.count()));
  append_big_endian(bytes, static_cast<uint32_t>(set.size.height));
  append_big_endian(bytes, static_cast<uint32_t>(set.size.width));
  bytes.insert(bytes.end(), set.pixels.begin(), set.pixels.end());
  write_file(files.images, bytes);

  bytes.clear();
  append_big_endian(bytes, kLabelsMagic);
  append_big_endian(bytes, static_cast<uint32_t>(set.count()));
  bytes.insert(bytes.end(), set.labels.begin(), set.labels.end());
  write_file(files.labels, bytes);
}

}  // namespace gpipe::examples::mnist
