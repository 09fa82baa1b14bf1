#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>

#include "absl/functional/function_ref.h"

namespace gpipe {

using ByteSink = std::function<void(const void* data, std::size_t size)>;

/// Replaces a file atomically by the bytes that `write` passes to its argument: the path always names a complete file.
/// The bytes go to a temporary file, the path with ".tmp" appended, which is flushed to the disk and renamed. Then the
/// folder is flushed. A failure before the rename, including a power cut, leaves the previous file unchanged.
///
/// Overwrites a temporary file left by a killed process, and removes its own after an error. Errors: those of `write`;
/// std::system_error with the path and the reason; operation_would_block for another writer of the path, in this
/// process or another. After an error the path names the previous file, unless only flushing the folder failed.
void replace_file(const std::filesystem::path& path, absl::FunctionRef<void(const ByteSink& sink)> write);

/// Makes a folder, unless it exists, and locks it while this lives. Errors: std::system_error with the path and the
/// reason; operation_would_block if another one, in this process or another, has locked it. Ignores file systems that
/// cannot lock.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_;
};

}  // namespace gpipe
