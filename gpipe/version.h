#pragma once

#include "gpipe/api.h"

namespace gpipe {

/// Returns the version of the library, such as "0.1.0".
GPIPE_API const char* version();

}  // namespace gpipe
