#pragma once

namespace gpipe {

/// Returns the version of the library, such as "0.1.0".
const char* version();

}  // namespace gpipe
