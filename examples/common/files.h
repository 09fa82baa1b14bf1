#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

namespace gpipe::examples {

/// Returns the bytes of a regular file. Errors: std::runtime_error with the reason alone.
std::string read_file(const std::filesystem::path& path);

/// Creates or replaces a file. Errors: std::runtime_error with the path and the reason.
void write_file(const std::filesystem::path& path, std::string_view bytes);

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
