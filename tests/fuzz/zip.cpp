#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "gpipe/snapshot/zip_records.h"

/// The input is a zip archive. Every byte of every record is read.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Copied to the heap, so that AddressSanitizer notices a read past the end.
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    for (const auto& [name, record] : gpipe::zip_records(bytes)) {
      volatile unsigned sum = 0;
      for (const char byte : record) sum = sum + static_cast<unsigned char>(byte);
    }
  } catch (const std::runtime_error&) {
  }
  return 0;
}
