#include "gpipe/snapshot/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "absl/cleanup/cleanup.h"

namespace gpipe {
namespace {

std::error_code last_error() { return {errno, std::generic_category()}; }

/// Locks the temporary file. Fails with operation_would_block if another writer has locked it, or has renamed it since
/// it was opened here. Ignores file systems that cannot lock.
std::error_code lock(int file, const std::filesystem::path& path) {
  if (::flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return last_error();
  struct stat opened;
  struct stat named;
  if (::fstat(file, &opened) != 0) return last_error();
  if (::stat(path.c_str(), &named) != 0 || opened.st_ino != named.st_ino) {
    return std::make_error_code(std::errc::operation_would_block);
  }
  return {};
}

std::error_code write_all(int file, const void* data, std::size_t size) {
  auto rest = static_cast<const char*>(data);
  while (size > 0) {
    const auto written = ::write(file, rest, size);
    if (written >= 0) {
      rest += written;
      size -= written;
    } else if (errno != EINTR) {
      return last_error();
    }
  }
  return {};
}

/// Makes a rename durable. Some file systems cannot flush a folder and return EINVAL, which is ignored.
std::error_code flush_folder(std::filesystem::path folder) {
  if (folder.empty()) folder = ".";
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return last_error();
  std::error_code error;
  if (::fsync(descriptor) != 0 && errno != EINVAL) error = last_error();
  ::close(descriptor);
  return error;
}

}  // namespace

void replace_file(const std::filesystem::path& path, absl::FunctionRef<void(const ByteSink& sink)> write) {
  const auto check = [&](const std::error_code& error) {
    if (error) throw std::system_error(error, "cannot write '" + path.string() + "'");
  };
  auto temporary = path;
  temporary += ".tmp";
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) check(last_error());
  const absl::Cleanup close = [&] { ::close(file); };
  const auto locked = lock(file, temporary);
  if (locked == std::errc::operation_would_block) {
    throw std::system_error(locked, "another writer is writing '" + path.string() + "'");
  }
  check(locked);
  // Removes the file while it is still locked, so that it cannot be another writer's.
  absl::Cleanup remove = [&] { ::unlink(temporary.c_str()); };
  if (::ftruncate(file, 0) != 0) check(last_error());
  write([&](const void* data, std::size_t size) { check(write_all(file, data, size)); });
  if (::fsync(file) != 0) check(last_error());
  if (::rename(temporary.c_str(), path.c_str()) != 0) check(last_error());
  std::move(remove).Cancel();
  check(flush_folder(path.parent_path()));
}

FolderLock::FolderLock(const std::filesystem::path& folder) {
  const auto check = [&](const std::error_code& error) {
    if (error) throw std::system_error(error, "cannot write to the folder '" + folder.string() + "'");
  };
  std::error_code error;
  const bool is_new = std::filesystem::create_directories(folder, error);
  check(error);
  if (is_new) check(flush_folder(folder.parent_path()));
  descriptor_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor_ < 0) check(last_error());
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(descriptor_);
  throw std::system_error(std::make_error_code(std::errc::operation_would_block),
                          "another writer is writing to '" + folder.string() + "'");
}

FolderLock::~FolderLock() { ::close(descriptor_); }

}  // namespace gpipe
