#include "examples/resnet18_mnist/idx.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "examples/common/files.h"
#include "tests/support/support.h"

/// The input is one byte with the length of the image file, then the image file, then the label file.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  static const gpipe::TemporaryDirectory folder;
  const auto files = gpipe::examples::mnist::training_files(folder.path());
  const auto length = std::min<std::size_t>(*data, size - 1);
  gpipe::examples::write_file(files.images, {data + 1, data + 1 + length});
  gpipe::examples::write_file(files.labels, {data + 1 + length, data + size});
  try {
    const auto set = gpipe::examples::mnist::read_idx(files);
    const auto pixels =
        set.count() * static_cast<std::size_t>(set.size.width) * static_cast<std::size_t>(set.size.height);
    if (set.count() == 0 || set.pixels.size() != pixels) std::abort();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
