#pragma once

#include <chrono>

namespace gpipe {

/// The clock of timelines: seconds of std::chrono::steady_clock.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace gpipe
