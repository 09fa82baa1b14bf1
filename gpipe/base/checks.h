#pragma once

#include <stdexcept>
#include <string>

#include "absl/strings/str_cat.h"

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

/// Returns an error's text as a part of another one's.
inline std::string reason_of(const std::string& what) { return what.starts_with("[gpipe] ") ? what.substr(8) : what; }

}  // namespace gpipe
