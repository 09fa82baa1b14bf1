#include "gpipe/snapshot/snapshot.h"

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <stdexcept>

#include "tests/support/support.h"

/// The input is the file.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const gpipe::TemporaryDirectory folder;
  const auto path = folder / "input";
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  try {
    gpipe::read_snapshot(path);
  } catch (const std::runtime_error&) {
  }
  return 0;
}
