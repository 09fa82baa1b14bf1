#include "gpipe/base/checks.h"

#include <stdexcept>
#include <string>

namespace gpipe {

void refuse_argument(const std::string& what) { throw std::invalid_argument("[gpipe] " + what); }

}  // namespace gpipe
