#include "gpipe/snapshot/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

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

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)), temporary_(path_) {
  temporary_ += ".tmp";
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) fail(last_error());
  auto error = lock(file_, temporary_);
  if (!error && ::ftruncate(file_, 0) != 0) error = last_error();
  if (!error) return;
  ::close(file_);
  if (error == std::errc::operation_would_block) {
    throw std::system_error(error, "another writer is writing '" + path_.string() + "'");
  }
  fail(error);
}

AtomicFile::~AtomicFile() {
  // Removes the file while it is still locked, so that it cannot be another writer's.
  if (!committed_) ::unlink(temporary_.c_str());
  ::close(file_);
}

void AtomicFile::write(const void* data, std::size_t size) {
  auto rest = static_cast<const char*>(data);
  while (size > 0) {
    const auto written = ::write(file_, rest, size);
    if (written >= 0) {
      rest += written;
      size -= written;
    } else if (errno != EINTR) {
      fail(last_error());
    }
  }
}

void AtomicFile::commit() {
  if (::fsync(file_) != 0) fail(last_error());
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail(last_error());
  committed_ = true;
  if (const auto error = flush_folder(path_.parent_path())) fail(error);
}

void AtomicFile::fail(const std::error_code& reason) const {
  throw std::system_error(reason, "cannot write '" + path_.string() + "'");
}

}  // namespace gpipe
