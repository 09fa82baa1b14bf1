#pragma once

#include <cstddef>
#include <filesystem>
#include <system_error>

namespace gpipe {

/// Replaces a file atomically: its path always names a complete file. The bytes go to a temporary file in the same
/// folder; commit() flushes them to the disk, renames the file and flushes the folder. A failure before the rename,
/// including a power cut, leaves the previous file unchanged.
///
/// The temporary file has the path with ".tmp" appended. The destructor removes it unless it was renamed; the next
/// writer overwrites one left by a killed process. A second writer of the same path, in this process or another, is
/// refused.
class AtomicFile {
 public:
  /// Errors: std::runtime_error with the path and the reason.
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends. commit() reports a failure, because archive writers cannot stop half-way.
  void write(const void* data, std::size_t size) noexcept;

  /// Puts the file in place. REQUIRES: called at most once. Errors: std::runtime_error with the path and the first
  /// failure, such as a full disk. The path then names the previous file, or the new one if only flushing the folder
  /// failed.
  void commit();

 private:
  [[noreturn]] void fail(const std::error_code& reason) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int file_ = -1;
  std::error_code error_;
  bool committed_ = false;
};

}  // namespace gpipe
