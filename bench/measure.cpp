#include "bench/measure.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <ostream>
#include <system_error>

namespace gpipe::bench {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

void print(std::ostream& out, const Measurement& measurement) {
  const double value = median(measurement.values);
  const auto [low, high] = std::minmax_element(measurement.values.begin(), measurement.values.end());
  nlohmann::ordered_json line = {{"bench", measurement.bench},
                                 {"model", measurement.model},
                                 {"stages", measurement.stages},
                                 {"chunks", measurement.chunks},
                                 {"checkpoint", measurement.checkpoint},
                                 {"value", value},
                                 {"unit", measurement.unit},
                                 {"min", *low},
                                 {"max", *high},
                                 {"repeats", measurement.values.size()}};
  if (measurement.bound) {
    line["bound"] = *measurement.bound;
    line["of_bound"] = value / *measurement.bound;
  }
  out << line << std::endl;
}

std::vector<std::vector<double>> interleave(const std::vector<std::function<void()>>& functions, int repeats) {
  std::vector<std::vector<double>> seconds(functions.size());
  for (const auto& function : functions) function();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (std::size_t i = 0; i < functions.size(); ++i) {
      const auto start = std::chrono::steady_clock::now();
      functions[i]();
      seconds[i].push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  }
  return seconds;
}

void pin_to_one_core() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(0, &cores);
  if (sched_setaffinity(0, sizeof cores, &cores) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot pin this process to a core");
  }
}

}  // namespace gpipe::bench
