#pragma once

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace gpipe::examples {

inline std::string reason() { return std::generic_category().message(errno != 0 ? errno : EIO); }

/// Returns the bytes of a regular file. Errors: std::runtime_error with the reason alone.
inline std::string read_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) throw std::runtime_error("cannot be opened: " + error.message());
  errno = 0;
  std::string bytes(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (file.read(bytes.data(), static_cast<std::streamsize>(size))) return bytes;
  throw std::runtime_error("cannot be read: " + reason());
}

/// Creates or replaces a file. Errors: std::runtime_error with the path and the reason.
inline void write_file(const std::filesystem::path& path, std::string_view bytes) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string() + ": " + reason());
}

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
