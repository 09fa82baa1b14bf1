#include "examples/resnet18_mnist/idx.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "examples/common/files.h"
#include "tests/support/support.h"

/// The input is one byte with the length of the image file, then the image file, then the label file.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  static const gpipe::TemporaryDirectory folder;
  const auto files = gpipe::examples::mnist::training_files(folder.path());
  const auto length = std::min<std::size_t>(*data, size - 1);
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  gpipe::examples::write_file(files.images, bytes.substr(0, length));
  gpipe::examples::write_file(files.labels, bytes.substr(length));
  try {
    const auto set = gpipe::examples::mnist::read_idx(files);
    if (set.images.dim() != 3 || set.images.size(0) != set.labels.size(0)) std::abort();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
