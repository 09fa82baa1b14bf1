#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace gpipe {

/// How often a thread that waits looks for a signal to the process.
inline constexpr std::chrono::milliseconds kPollPeriod{50};

/// The clock of timelines: seconds of std::chrono::steady_clock.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Returns the middle value. Of an even count, returns the upper of the two middle ones. Returns 0 if there are no values.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return values.empty() ? 0 : *middle;
}

}  // namespace gpipe
