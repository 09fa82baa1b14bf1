#include "gpipe/snapshot/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

/// The input is a safetensors file, or the JSON of a snapshot if it begins with "{".
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    gpipe::Safetensors file{.tensors = {}, .training = bytes};
    if (!bytes.starts_with('{')) {
      std::istringstream stream(bytes);
      file = gpipe::read_safetensors(stream, size);
    }
    static_cast<void>(gpipe::from_safetensors(file));
  } catch (const std::runtime_error&) {
  }
  return 0;
}
