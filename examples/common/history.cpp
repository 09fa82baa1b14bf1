#include "examples/common/history.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include "absl/strings/str_join.h"

namespace gpipe::examples {
namespace {

constexpr double kExactIntegers = 9007199254740992;  // 2^53

const std::vector<std::string>& checked(const std::vector<std::string>& columns) {
  if (columns.empty()) throw std::invalid_argument("a history needs at least one column");
  return columns;
}

}  // namespace

History::History(const std::filesystem::path& path, const std::vector<std::string>& columns,
                 const std::vector<std::vector<double>>& lines)
    : columns_(checked(columns).size()), file_(temporary_history(path)) {
  try {
    file_.write(absl::StrJoin(columns, ",") + "\n");
    for (const auto& line : lines) write_line(line);
    file_.rename(path);
  } catch (...) {
    std::error_code error;
    std::filesystem::remove(temporary_history(path), error);
    throw;
  }
}

void History::add(const std::vector<double>& values) {
  write_line(values);
  file_.flush();
}

void History::write_line(const std::vector<double>& values) {
  if (values.size() != columns_) {
    throw std::invalid_argument("the history " + file_.path().string() + " has " + std::to_string(columns_) +
                                " columns, but the line has " + std::to_string(values.size()) + " values");
  }
  std::ostringstream line;
  line.imbue(std::locale::classic());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) line << ',';
    if (std::trunc(values[i]) == values[i] && std::abs(values[i]) < kExactIntegers) {
      line << static_cast<long long>(values[i]);
    } else {
      line << values[i];
    }
  }
  line << '\n';
  file_.write(line.str());
}

std::filesystem::path temporary_history(std::filesystem::path path) { return path += ".tmp"; }

int count_lines(const std::filesystem::path& csv) {
  std::ifstream file(csv);
  int count = 0;
  for (std::string line; std::getline(file, line);) ++count;
  return std::max(count - 1, 0);
}

}  // namespace gpipe::examples
