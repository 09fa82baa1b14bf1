#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "examples/common/files.h"

namespace gpipe::examples {

/// A CSV file with a header and a line an epoch, each on disk as soon as it is added: a run that stops leaves whole
/// lines. Whole numbers are written in full, others with six significant digits and a decimal point, whatever the
/// locale.
///
/// Errors: std::runtime_error that names the path where it cannot be written; std::invalid_argument for no columns, or
/// where a line has not one value a column.
class History {
 public:
  /// Creates or replaces the file, with such lines. An older file is there until the new one is complete.
  History(const std::filesystem::path& path, const std::vector<std::string>& columns,
          const std::vector<std::vector<double>>& lines = {});

  void add(const std::vector<double>& values);

 private:
  void write_line(const std::vector<double>& values);

  std::size_t columns_;
  OutputFile file_;
};

/// Whether there is such a file that has a line besides its header.
bool has_lines(const std::filesystem::path& csv);

}  // namespace gpipe::examples
