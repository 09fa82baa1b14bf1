#include "examples/common/files.h"

#include <cerrno>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace gpipe::examples {

void check_writable_directory(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error && !std::filesystem::is_directory(path, error)) error = std::make_error_code(std::errc::not_a_directory);
  if (error) throw std::runtime_error("cannot make the directory " + path.string() + ": " + error.message());
  const auto probe = path / ".write-probe";
  write_file(probe, {});
  std::filesystem::remove(probe, error);
}

void write_file(const std::filesystem::path& path, const std::vector<uint8_t>& bytes) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) {
    const auto reason = std::error_code(errno != 0 ? errno : EIO, std::generic_category()).message();
    throw std::runtime_error("cannot write " + path.string() + ": " + reason);
  }
}

}  // namespace gpipe::examples
