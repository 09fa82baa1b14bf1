#pragma once

#include <chrono>

namespace gpipe {

/// How often a thread that waits looks for a signal to the process.
inline constexpr std::chrono::milliseconds kPollPeriod{50};

/// The clock of timelines: seconds of std::chrono::steady_clock.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace gpipe
