#pragma once

#include <cstddef>
#include <filesystem>
#include <system_error>

namespace gpipe {

/// Writes a file so that its path always names a whole one: the bytes go to a temporary file in the same folder,
/// commit() flushes them to the disk and renames it. Whatever happens before that, power cut included, leaves the
/// previous file as it was.
///
/// The temporary is named as the file with ".tmp" behind. It is removed unless commit() succeeds; one that a killed
/// process left is overwritten by the next writer. Two writers at a time, in one process or two: the second is refused.
class AtomicFile {
 public:
  /// Errors: std::runtime_error with the path and the reason, as for commit().
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends. A failure is kept for commit(), so that archive writers, which cannot stop half-way, need not.
  void write(const void* data, std::size_t size) noexcept;

  /// Puts the file in place, once. Errors: std::runtime_error for the first thing that failed, a full disk too.
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
