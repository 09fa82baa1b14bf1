#pragma once

#include <cstddef>
#include <filesystem>

namespace gpipe {

/// Replaces a file atomically: its path always names a complete file. The bytes go to a temporary file, the path with
/// ".tmp" appended; commit() flushes them to the disk, renames the file and flushes the folder. A failure before the
/// rename, including a power cut, leaves the previous file unchanged.
///
/// The destructor removes the temporary file unless it was renamed. The next writer overwrites one left by a killed
/// process. A second writer of the same path, in this process or another, is refused.
class AtomicFile {
 public:
  /// Opens the temporary file. Errors: std::system_error with the path and the reason, as from all methods;
  /// operation_would_block for another writer of the path.
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t size);

  /// REQUIRES: called at most once. On an error the path names the previous file, unless only flushing the folder
  /// failed.
  void commit();

 private:
  [[noreturn]] void fail(const std::error_code& reason) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int file_ = -1;
  bool committed_ = false;
};

}  // namespace gpipe
