#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "examples/common/files.h"

namespace gpipe::examples {

/// A CSV file with a header and one line per epoch. Each line is on disk as soon as it is added, so a run that stops
/// leaves whole lines. Integers are written in full, other numbers with six significant digits and a decimal point,
/// in any locale.
///
/// Errors: std::runtime_error with the path, if the file cannot be written; std::invalid_argument for no columns, or
/// for a line that does not have one value per column.
class History {
 public:
  /// Creates or replaces the file, with these lines. It writes a temporary file first, so an older file stays until the
  /// new one is complete.
  History(const std::filesystem::path& path, const std::vector<std::string>& columns,
          const std::vector<std::vector<double>>& lines = {});

  void add(const std::vector<double>& values);

 private:
  void write_line(const std::vector<double>& values);

  std::size_t columns_;
  OutputFile file_;
};

/// The file that a History writes before it replaces `path`.
std::filesystem::path temporary_history(std::filesystem::path path);

/// Returns the number of lines after the header; 0 if there is no such file.
int count_lines(const std::filesystem::path& csv);

}  // namespace gpipe::examples
