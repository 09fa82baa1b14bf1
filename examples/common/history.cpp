#include "examples/common/history.h"

#include <cmath>
#include <locale>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_join.h"

namespace gpipe::examples {
namespace {

constexpr double kExactIntegers = 9007199254740992;  // 2^53

}  // namespace

History::History(std::filesystem::path path, const std::vector<std::string>& columns)
    : path_(std::move(path)), columns_(columns.size()) {
  if (columns.empty()) throw std::invalid_argument("a history needs at least one column");
  file_.open(path_);
  file_.imbue(std::locale::classic());
  file_ << absl::StrJoin(columns, ",");
  end_line();
}

void History::add(const std::vector<double>& values) {
  if (values.size() != columns_) {
    throw std::invalid_argument("the history " + path_.string() + " has " + std::to_string(columns_) +
                                " columns, but was given " + std::to_string(values.size()) + " values");
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) file_ << ',';
    if (std::trunc(values[i]) == values[i] && std::abs(values[i]) < kExactIntegers) {
      file_ << static_cast<long long>(values[i]);
    } else {
      file_ << values[i];
    }
  }
  end_line();
}

void History::end_line() {
  file_ << '\n' << std::flush;
  if (!file_) throw std::runtime_error("cannot write the history " + path_.string());
}

}  // namespace gpipe::examples
