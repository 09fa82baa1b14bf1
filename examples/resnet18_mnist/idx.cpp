#include "examples/resnet18_mnist/idx.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "examples/common/files.h"

namespace gpipe::examples::mnist {
namespace {

namespace fs = std::filesystem;

// Two zero bytes, the type (8 for bytes), the number of dimensions.
constexpr uint32_t kImagesMagic = 0x00000803;
constexpr uint32_t kLabelsMagic = 0x00000801;
constexpr uint32_t kLargestSide = 4096;

size_t header_size(uint32_t magic) { return 4 * (1 + (magic & 0xff)); }

struct Idx {
  std::vector<uint32_t> dimensions;
  std::vector<uint8_t> bytes;
};

uint32_t big_endian(const uint8_t* at) {
  return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | at[3];
}

void append_big_endian(std::vector<uint8_t>& bytes, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<uint8_t>(value >> shift));
}

// The length of a regular file.
uint64_t size_of(const fs::path& path) {
  const fs::path compressed = path.string() + ".gz";
  if (!fs::exists(path) && fs::exists(compressed)) {
    throw std::runtime_error("missing, but " + compressed.string() + " exists; run gunzip on it");
  }
  std::error_code error;
  const auto size = fs::file_size(path, error);
  if (error) throw std::runtime_error("cannot be opened: " + error.message());
  return size;
}

// Returns fewer bytes if the file ends before.
std::vector<uint8_t> read_bytes(std::ifstream& file, uint64_t count) {
  std::vector<uint8_t> bytes(count);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(count));
  if (file.bad()) throw std::runtime_error("cannot be read");
  bytes.resize(static_cast<size_t>(file.gcount()));
  return bytes;
}

// The number of bytes that follow a header.
uint64_t byte_count(const std::vector<uint32_t>& dimensions) {
  if (dimensions[0] == 0) throw std::runtime_error("the file has no items");
  uint64_t count = dimensions[0];
  for (size_t i = 1; i < dimensions.size(); ++i) {
    if (dimensions[i] < 1 || dimensions[i] > kLargestSide) {
      throw std::runtime_error(absl::StrFormat("images of %d rows and %d columns; 1 to %d are supported", dimensions[1],
                                               dimensions[2], kLargestSide));
    }
    count *= dimensions[i];
  }
  return count;
}

std::vector<uint32_t> parse_header(const std::vector<uint8_t>& bytes, uint32_t magic) {
  if (bytes.empty()) throw std::runtime_error("the file is empty");
  if (bytes.size() >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b) {
    throw std::runtime_error("compressed; run gunzip on it");
  }
  if (bytes.size() >= 4 && big_endian(bytes.data()) != magic) {
    throw std::runtime_error(absl::StrFormat("not an IDX file of %s: it starts with 0x%08x instead of 0x%08x",
                                             magic == kImagesMagic ? "images" : "labels", big_endian(bytes.data()),
                                             magic));
  }
  if (bytes.size() < header_size(magic)) {
    throw std::runtime_error(
        absl::StrFormat("truncated: %d bytes, but the header alone has %d", bytes.size(), header_size(magic)));
  }
  std::vector<uint32_t> dimensions;
  for (size_t at = 4; at < bytes.size(); at += 4) dimensions.push_back(big_endian(&bytes[at]));
  return dimensions;
}

Idx read_whole(const fs::path& path, uint32_t magic) {
  const auto size = size_of(path);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot be opened: " + std::generic_category().message(errno));
  Idx idx{.dimensions = parse_header(read_bytes(file, header_size(magic)), magic), .bytes = {}};
  const auto expected = byte_count(idx.dimensions);
  auto found = size - header_size(magic);
  if (found == expected) {
    idx.bytes = read_bytes(file, expected);
    found = idx.bytes.size();
  }
  if (found != expected) {
    throw std::runtime_error(absl::StrFormat("%s: %d bytes after the header, which announces %d",
                                             found < expected ? "truncated" : "too long", found, expected));
  }
  return idx;
}

Idx read(const fs::path& path, uint32_t magic) {
  try {
    return read_whole(path, magic);
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
    throw std::runtime_error(absl::StrFormat("%s has %d images, but %s has %d labels", files.images.string(),
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
