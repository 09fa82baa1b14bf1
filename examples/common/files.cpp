#include "examples/common/files.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <stdexcept>
#include <system_error>

namespace gpipe::examples {
namespace {

std::string reason() { return std::generic_category().message(errno != 0 ? errno : EIO); }

}  // namespace

std::string read_file(const std::filesystem::path& path, std::size_t most) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) throw std::runtime_error("cannot be opened: " + error.message());
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot be opened: " + reason());
  std::string bytes(std::min<std::size_t>(size, most), '\0');
  if (!file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
    throw std::runtime_error("cannot be read: " + reason());
  }
  return bytes;
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string() + ": " + reason());
}

void replace_file(const std::filesystem::path& path, std::string_view bytes) {
  auto temporary = path;
  temporary += ".tmp";
  write_file(temporary, bytes);
  std::filesystem::rename(temporary, path);
}

}  // namespace gpipe::examples
