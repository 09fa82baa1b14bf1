#pragma once

#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

namespace gpipe::bench {

/// A line of output: what was measured, and how.
struct Measurement {
  std::string bench;
  std::string model;
  int stages = 1;
  int chunks = 1;
  std::string checkpoint;
  std::string unit;
  std::vector<double> values;  ///< one a repeat; at least one
  std::optional<double> bound;  ///< what no pipeline could exceed, in the same unit
};

/// The middle value; the mean of the two middle ones of an even number.
double median(std::vector<double> values);

/// One JSON object on a line of its own: the fields, with the values as "value" (their median), "min", "max" and
/// "repeats", and with a bound "bound" and "of_bound".
void print(std::ostream& out, const Measurement& measurement);

/// Calls each function once to warm up, then all of them in turn, `repeats` times: what disturbs the machine disturbs
/// all alike. Returns the seconds of each call, by function and repeat.
std::vector<std::vector<double>> interleave(const std::vector<std::function<void()>>& functions, int repeats);

/// From now on this process runs on one core. Call before any thread is started.
void pin_to_one_core();

}  // namespace gpipe::bench
