#include "examples/common/files.h"

#include <cerrno>
#include <fstream>
#include <system_error>

namespace gpipe::examples {
namespace {

std::string reason() { return std::generic_category().message(errno != 0 ? errno : EIO); }

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) throw std::runtime_error("cannot be opened: " + error.message());
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot be opened: " + reason());
  std::string bytes(size, '\0');
  if (file.read(bytes.data(), static_cast<std::streamsize>(size))) return bytes;
  throw std::runtime_error("cannot be read: " + reason());
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string() + ": " + reason());
}

}  // namespace gpipe::examples
