#pragma once

#include <stdexcept>
#include <string>

#include "absl/strings/str_format.h"

namespace gpipe {

/// Throws std::invalid_argument with "[gpipe] " before `what`.
[[noreturn]] inline void refuse_argument(const std::string& what) { throw std::invalid_argument("[gpipe] " + what); }

/// Returns the error with the text of absl::StrFormat().
template <typename... Args>
std::invalid_argument invalid(const absl::FormatSpec<Args...>& format, const Args&... args) {
  return std::invalid_argument(absl::StrFormat(format, args...));
}

}  // namespace gpipe
