#pragma once

#include <cstddef>
#include <filesystem>
#include <system_error>

namespace gpipe {

/// Writes a file so that its path always names a whole one: the bytes go to a temporary file in the same folder, and
/// commit() flushes them to the disk, renames the file and flushes the folder. Whatever happens before the rename, a
/// power cut included, leaves the previous file as it was.
///
/// The temporary file has the same name with ".tmp" behind. It is removed unless it is renamed; the next writer
/// overwrites one that a killed process left. Of two writers at a time, in one process or two, the second is refused.
class AtomicFile {
 public:
  /// Errors: std::runtime_error with the path and the reason, as for commit().
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends. A failure is kept for commit(), so that archive writers, which cannot stop half-way, need not.
  void write(const void* data, std::size_t size) noexcept;

  /// Puts the file in place, once. Errors: std::runtime_error for the first thing that failed, a full disk too. The
  /// path then names the previous file or, where only the folder could not be flushed, the new one.
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
