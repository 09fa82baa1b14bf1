#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace gpipe::examples {

/// A CSV file with a header and a line an epoch, each on disk as soon as it is added: a run that stops leaves whole
/// lines. Whole numbers are written in full, others with six significant digits and a decimal point, whatever the
/// locale.
class History {
 public:
  /// Creates or replaces the file. Throws std::invalid_argument for no columns, std::runtime_error that names the path
  /// where it cannot be written.
  History(std::filesystem::path path, const std::vector<std::string>& columns);

  /// One value a column, else std::invalid_argument. Throws std::runtime_error that names the path where it cannot be
  /// written.
  void add(const std::vector<double>& values);

 private:
  void end_line();

  std::filesystem::path path_;
  std::size_t columns_;
  std::ofstream file_;
};

}  // namespace gpipe::examples
