#include "examples/common/files.h"

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace gpipe::examples {
namespace {

namespace fs = std::filesystem;

// The topmost folders that make_directory() created.
std::vector<fs::path>& created() {
  static std::vector<fs::path> paths;
  return paths;
}

// The topmost folder that would have to be created for `path` to exist; empty if there is none.
fs::path topmost_missing(fs::path path) {
  fs::path missing;
  std::error_code error;
  for (; !path.empty() && !fs::exists(path, error); path = path.parent_path()) missing = path;
  return missing;
}

bool holds_a_file(const fs::path& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_symlink() || !entry.is_directory()) return true;
  }
  return false;
}

[[noreturn]] void fail_to_write(const fs::path& path, const std::error_code& reason) {
  throw std::runtime_error("cannot write " + path.string() + ": " + reason.message());
}

}  // namespace

void make_directory(const fs::path& path) {
  std::error_code error;
  const fs::path missing = topmost_missing(fs::absolute(path).lexically_normal());
  fs::create_directories(path, error);
  if (!missing.empty() && fs::is_directory(missing)) created().push_back(missing);
  if (!error && !fs::is_directory(path, error)) error = std::make_error_code(std::errc::not_a_directory);
  if (error) throw std::runtime_error("cannot create the folder " + path.string() + ": " + error.message());
}

void remove_empty_directories() {
  for (const auto& folder : created()) {
    std::error_code error;
    try {
      if (fs::is_directory(folder, error) && !holds_a_file(folder)) fs::remove_all(folder, error);
    } catch (const fs::filesystem_error&) {
      // A folder that cannot be read stays.
    }
  }
  created().clear();
}

void check_writable_directory(const fs::path& path) {
  make_directory(path);
  const auto probe = path / ".write-probe";
  write_file(probe, "");
  std::error_code error;
  fs::remove(probe, error);
}

void check_writable_file(const fs::path& path) {
  std::error_code error;
  if (!path.has_filename() || fs::is_directory(path, error)) {
    fail_to_write(path, std::make_error_code(std::errc::is_a_directory));
  }
  make_directory(path.has_parent_path() ? path.parent_path() : ".");
  const bool was_there = fs::exists(path, error);
  errno = 0;
  if (!std::ofstream(path, std::ios::app)) fail_to_write(path, {errno != 0 ? errno : EIO, std::generic_category()});
  if (!was_there) fs::remove(path, error);
}

void write_file(const fs::path& path, std::string_view bytes) {
  OutputFile file(path);
  file.write(bytes);
  file.close();
}

void write_file(const fs::path& path, const std::vector<uint8_t>& bytes) {
  write_file(path, std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

OutputFile::OutputFile(fs::path path) : path_(std::move(path)) {
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

void OutputFile::rename(fs::path path) {
  flush();
  std::error_code error;
  fs::rename(path_, path, error);
  if (error) fail_to_write(path, error);
  path_ = std::move(path);
}

void OutputFile::fail(int error) const { fail_to_write(path_, {error != 0 ? error : EIO, std::generic_category()}); }

}  // namespace gpipe::examples
