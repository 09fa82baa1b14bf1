#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "examples/common/files.h"
#include "tests/support/support.h"

namespace gpipe::examples {

inline std::vector<uint8_t> read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Truncates a file.
inline void cut(const std::filesystem::path& path, size_t bytes) { std::filesystem::resize_file(path, bytes); }

inline void write_text(const std::filesystem::path& path, const std::string& text) { write_file(path, text); }

/// The FNV-1a hash.
inline uint64_t fingerprint(const std::vector<uint8_t>& bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

}  // namespace gpipe::examples
