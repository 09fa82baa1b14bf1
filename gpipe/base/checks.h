#pragma once

#include <stdexcept>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace gpipe {

/// Throws std::invalid_argument with "[gpipe] " before the parts, which absl::StrCat() joins.
template <typename... Parts>
[[noreturn]] void refuse_argument(const Parts&... parts) {
  throw std::invalid_argument(absl::StrCat("[gpipe] ", parts...));
}

/// The same for std::runtime_error.
template <typename... Parts>
[[noreturn]] void throw_error(const Parts&... parts) {
  throw std::runtime_error(absl::StrCat("[gpipe] ", parts...));
}

/// Returns the error with the text of absl::StrFormat().
template <typename... Args>
std::invalid_argument invalid(const absl::FormatSpec<Args...>& format, const Args&... args) {
  return std::invalid_argument(absl::StrFormat(format, args...));
}

/// Throws that error unless `holds`.
template <typename... Args>
void require(bool holds, const absl::FormatSpec<Args...>& format, const Args&... args) {
  if (!holds) throw invalid(format, args...);
}

}  // namespace gpipe
