#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <vector>

namespace gpipe::examples {

// All errors are std::runtime_error with the path and the reason.

/// Makes the directory, and those above it, where missing.
void make_directory(const std::filesystem::path& path);
/// The same, and tries that files can be written there.
void check_writable_directory(const std::filesystem::path& path);
/// Tries that the file can be written, and makes its directory where missing. A file that is there stays as it is.
void check_writable_file(const std::filesystem::path& path);

/// Creates or replaces a file.
void write_file(const std::filesystem::path& path, std::string_view bytes);
void write_file(const std::filesystem::path& path, const std::vector<uint8_t>& bytes);

/// A file that grows. What was written may stay in memory until flush(). Not synchronised.
class OutputFile {
 public:
  /// Creates or replaces it.
  explicit OutputFile(std::filesystem::path path);

  void write(std::string_view bytes);
  void flush();
  /// Flushes it and ends it.
  void close();
  /// Flushes it and gives it another name in the same directory, where it takes the place of any other file.
  void rename(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }

 private:
  [[noreturn]] void fail(int error) const;

  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace gpipe::examples
