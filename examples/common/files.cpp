#include "examples/common/files.h"

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace gpipe::examples {
namespace {

[[noreturn]] void fail_to_write(const std::filesystem::path& path, const std::error_code& reason) {
  throw std::runtime_error("cannot write " + path.string() + ": " + reason.message());
}

}  // namespace

void make_directory(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error && !std::filesystem::is_directory(path, error)) error = std::make_error_code(std::errc::not_a_directory);
  if (error) throw std::runtime_error("cannot make the directory " + path.string() + ": " + error.message());
}

void check_writable_directory(const std::filesystem::path& path) {
  make_directory(path);
  const auto probe = path / ".write-probe";
  write_file(probe, "");
  std::error_code error;
  std::filesystem::remove(probe, error);
}

void check_writable_file(const std::filesystem::path& path) {
  std::error_code error;
  if (!path.has_filename() || std::filesystem::is_directory(path, error)) {
    fail_to_write(path, std::make_error_code(std::errc::is_a_directory));
  }
  make_directory(path.has_parent_path() ? path.parent_path() : ".");
  const bool was_there = std::filesystem::exists(path, error);
  errno = 0;
  if (!std::ofstream(path, std::ios::app)) fail_to_write(path, {errno != 0 ? errno : EIO, std::generic_category()});
  if (!was_there) std::filesystem::remove(path, error);
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  OutputFile file(path);
  file.write(bytes);
  file.close();
}

void write_file(const std::filesystem::path& path, const std::vector<uint8_t>& bytes) {
  write_file(path, std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

OutputFile::OutputFile(std::filesystem::path path) : path_(std::move(path)) {
  errno = 0;
  file_.open(path_, std::ios::binary);
  if (!file_) fail(errno);
}

void OutputFile::write(std::string_view bytes) {
  errno = 0;
  file_.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file_) fail(errno);
}

void OutputFile::flush() {
  errno = 0;
  file_.flush();
  if (!file_) fail(errno);
}

void OutputFile::close() {
  errno = 0;
  file_.close();
  if (!file_) fail(errno);
}

void OutputFile::rename(std::filesystem::path path) {
  flush();
  std::error_code error;
  std::filesystem::rename(path_, path, error);
  if (error) fail_to_write(path, error);
  path_ = std::move(path);
}

void OutputFile::fail(int error) const { fail_to_write(path_, {error != 0 ? error : EIO, std::generic_category()}); }

}  // namespace gpipe::examples
