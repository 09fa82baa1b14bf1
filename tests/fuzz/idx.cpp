#include "examples/resnet18_mnist/idx.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "examples/common/files.h"
#include "tests/support/support.h"

/// The input is the length of the file of images in a byte, that file, and the file of labels.
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
