#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <vector>

namespace gpipe::examples {

// Errors: std::runtime_error with the path and the reason.

/// Creates the folder and its parents if they are missing. Call it from one thread at a time.
void make_directory(const std::filesystem::path& path);
/// Removes the folders that make_directory() created in this process and that hold no file. For a program that fails.
void remove_empty_directories();
/// Creates the folder if it is missing, and checks that files can be written there.
void check_writable_directory(const std::filesystem::path& path);
/// Checks that the file can be written, and creates its folder if it is missing. An existing file is left as it is.
void check_writable_file(const std::filesystem::path& path);

/// Creates or replaces a file.
void write_file(const std::filesystem::path& path, std::string_view bytes);
void write_file(const std::filesystem::path& path, const std::vector<uint8_t>& bytes);

/// A file that grows. Bytes can stay in memory until flush(). Not synchronised.
class OutputFile {
 public:
  /// Creates or replaces the file.
  explicit OutputFile(std::filesystem::path path);

  void write(std::string_view bytes);
  void flush();
  /// Flushes and closes the file.
  void close();
  /// Flushes the file and renames it. It replaces any other file of the new name.
  /// REQUIRES: The new path is in the same folder.
  void rename(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }

 private:
  [[noreturn]] void fail(int error) const;

  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace gpipe::examples
