#pragma once

#include <stdexcept>
#include <string>

namespace gpipe {

/// Throws std::invalid_argument with "[gpipe] " before `what`.
[[noreturn]] inline void refuse_argument(const std::string& what) { throw std::invalid_argument("[gpipe] " + what); }

}  // namespace gpipe
