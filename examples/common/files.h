#pragma once

#include <cstddef>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>

namespace gpipe::examples {

/// Returns the bytes of a regular file, or only the first ones. Errors: std::runtime_error with the reason alone.
std::string read_file(const std::filesystem::path& path, std::size_t most = std::numeric_limits<std::size_t>::max());

/// Creates or replaces a file. Errors: std::runtime_error with the path and the reason.
void write_file(const std::filesystem::path& path, std::string_view bytes);

/// The same, but the path always names a complete file: the old one until the new one is written.
void replace_file(const std::filesystem::path& path, std::string_view bytes);

/// Puts the path before the message of any std::runtime_error of the call.
template <class Call>
auto with_name(const std::filesystem::path& path, Call call) {
  try {
    return call();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path.string() + ": " + error.what());
  }
}

}  // namespace gpipe::examples
