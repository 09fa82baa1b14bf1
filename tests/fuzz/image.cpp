#include "examples/common/image.h"

#include <zlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "examples/common/files.h"
#include "tests/support/support.h"

namespace {

using gpipe::examples::Size;

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::cerr << what << "\n";
  std::abort();
}

/// Corrects the checksums of a PNG's chunks, so that mutated files get past the checksum test.
void fix_checksums(std::vector<std::uint8_t>& file) {
  constexpr std::uint8_t kMagic[] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
  if (file.size() < sizeof kMagic || !std::equal(std::begin(kMagic), std::end(kMagic), file.begin())) return;
  std::size_t at = sizeof kMagic;
  while (file.size() - at >= 12) {
    std::size_t length = 0;
    for (int i = 0; i < 4; ++i) length = length << 8 | file[at + i];
    if (length > file.size() - at - 12) return;
    auto* data = &file[at + 4];
    const auto sum = crc32(0, data, static_cast<uInt>(length + 4));
    for (int i = 0; i < 4; ++i) data[length + 4 + i] = static_cast<std::uint8_t>(sum >> (24 - 8 * i));
    at += length + 12;
  }
}

/// Calls a reader, which can refuse the file with an error that names it.
template <class Read>
void read(const std::filesystem::path& path, Read call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    const std::string what = error.what();
    require(what.starts_with(path.string() + ": "), "the error does not name the file: " + what);
  }
}

}  // namespace

/// The input is a JPEG, PNG or GIF file. The checksums of a PNG are corrected first.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const gpipe::TemporaryDirectory folder;
  const auto path = folder / "input";
  std::vector<std::uint8_t> file(data, data + size);
  fix_checksums(file);
  gpipe::examples::write_file(path, {reinterpret_cast<const char*>(file.data()), file.size()});
  read(path, [&] {
    const auto image = gpipe::examples::read_image(path);
    const Size size{static_cast<int>(image.size(2)), static_cast<int>(image.size(1))};
    require(size == gpipe::examples::image_size(path), "the header has another size");
    require(image.size(0) == 3, "pixels are missing");
  });
  read(path, [&] {
    const auto image = gpipe::examples::read_image(path, Size{5, 3});
    require(image.size(1) == 3 && image.size(2) == 5, "not of the wanted size");
  });
  return 0;
}
