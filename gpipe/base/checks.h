#pragma once

#include <string>

namespace gpipe {

/// Throws std::invalid_argument with "[gpipe] " before `what`.
[[noreturn]] void refuse_argument(const std::string& what);

}  // namespace gpipe
