#include "bench/measure.h"

#include <c10/util/Exception.h>
#include <sched.h>
#include <torch/utils.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "balance/trial.h"

namespace gpipe::bench {

namespace {

nlohmann::ordered_json to_json(const Row& row) {
  nlohmann::ordered_json json = {
      {"model", row.model}, {"stages", row.stages}, {"chunks", row.chunks}, {"checkpoint", to_string(row.checkpoint)}};
  if (!row.schedule.empty()) json["schedule"] = row.schedule;
  return json;
}

}  // namespace

int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& measure) {
  try {
    app.parse(argc, argv);
    torch::set_num_threads(1);
    measure();
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  return 1;
}

void for_each_row(const Options& options, const std::function<void(const Row&)>& measure) {
  for (const auto& model : options.models) {
    for (const int stages : options.stages) {
      for (const int chunks : options.chunks) {
        for (const auto checkpoint : options.checkpoints)
          measure({model, stages, chunks, checkpoint, options.schedule, options.stages_per_worker});
      }
    }
  }
}

bool Measurement::passes() const { return !limit || median(values) <= *limit; }

void print(std::ostream& out, const Measurement& measurement) {
  const double value = median(measurement.values);
  const auto [low, high] = std::minmax_element(measurement.values.begin(), measurement.values.end());
  nlohmann::ordered_json line = {{"bench", measurement.bench}};
  line.update(to_json(measurement.row));
  line["value"] = value;
  line["unit"] = measurement.unit;
  line["min"] = *low;
  line["max"] = *high;
  line["repeats"] = measurement.values.size();
  if (measurement.bound) {
    line["bound"] = *measurement.bound;
    line["of_bound"] = value / *measurement.bound;
  }
  if (measurement.limit) {
    line["limit"] = *measurement.limit;
    line["passes"] = measurement.passes();
  }
  out << line << std::endl;
}

void print_steps(std::ostream& out, const Row& row, const std::string& name, const std::vector<double>& values) {
  nlohmann::ordered_json line = {{"peer", "gpipe"}};
  line.update(to_json(row));
  line[name] = values;
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

std::vector<double> quotients(const std::vector<double>& values, const std::vector<double>& divisors) {
  std::vector<double> quotients;
  for (std::size_t i = 0; i < values.size(); ++i) quotients.push_back(values[i] / divisors[i]);
  return quotients;
}

Costs costs_of(const Timeline& timeline, int stages) {
  Costs costs{std::vector<std::array<double, 5>>(stages), std::vector<double>(timeline.edges.size(), 0.0)};
  for (const auto& [action, spans] : most_overlapped(timeline)) {
    std::vector<double> seconds;
    for (const Span* span : spans) seconds.push_back(span->end - span->start);
    costs.actions[action.first][static_cast<std::size_t>(action.second)] = median(seconds);
  }
  return costs;
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
