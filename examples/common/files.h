#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace gpipe::examples {

/// Makes the directory, and those above it, where missing, and tries that files can be written there. Throws
/// std::runtime_error that names the path and the reason.
void check_writable_directory(const std::filesystem::path& path);

/// Creates or replaces a file. Throws std::runtime_error that names the path and the reason.
void write_file(const std::filesystem::path& path, const std::vector<uint8_t>& bytes);

}  // namespace gpipe::examples
