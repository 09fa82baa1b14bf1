#include "bench/measure.h"

#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <ostream>
#include <system_error>
#include <utility>

#include "balance/trial.h"
#include "gpipe/runtime/memory_reuse.h"

namespace gpipe::bench {

namespace {

nlohmann::ordered_json to_json(const Row& row) {
  return {
      {"model", row.model}, {"stages", row.stages}, {"chunks", row.chunks}, {"checkpoint", to_string(row.checkpoint)}};
}

}  // namespace

void add_flags(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default()->delimiter(',');
  app.add_option("--stages", options.stages)->check(CLI::PositiveNumber);
  app.add_option("--chunks", options.chunks, "micro-batches of a mini-batch")->check(CLI::PositiveNumber);
  app.add_option("--repeats", options.repeats)->check(CLI::PositiveNumber);
  std::vector<std::string> names;
  for (const auto checkpoint : options.checkpoints) names.push_back(to_string(checkpoint));
  app.add_option("--checkpoint", options.checkpoints, "never, except_last, always")
      ->transform(CLI::CheckedTransformer(checkpoints()))
      ->default_str(CLI::detail::join(names));
  app.add_flag_callback(
      "--reuse", [] { reuse_cpu_memory(); }, "keep the memory of tensors for the next");
}

void add_model_flag(CLI::App& app, Options& options) {
  app.add_option("--model", options.models)->check(CLI::IsMember(options.models));
}

void add_steps_flag(CLI::App& app, Options& options) {
  app.add_flag("--steps-only", options.steps_only, "print the figure of each step of the pipeline, and no other");
}

void add_balance_flag(CLI::App& app, Options& options) {
  app.add_option_function<std::vector<std::int64_t>>(
         "--balance",
         [&options](const auto& balance) {
           options.balance = balance;
           options.stages = {static_cast<int>(balance.size())};
         },
         "layers of each stage; default: cut by measured times")
      ->always_capture_default(false)
      ->excludes("--stages");
}

void add_short_flag(CLI::App& app, Options& options, std::vector<Checkpoint> checkpoints) {
  const auto shorten = [&options, checkpoints = std::move(checkpoints)] {
    options.repeats = 3;
    options.chunks = {4};
    options.checkpoints = checkpoints;
  };
  app.add_flag_callback("--short", shorten, "some of it, in about a minute");
}

void for_each_row(const Options& options, const std::function<void(const Row&)>& measure) {
  for (const auto& model : options.models) {
    for (const int stages : options.stages) {
      for (const int chunks : options.chunks) {
        for (const auto checkpoint : options.checkpoints) measure({model, stages, chunks, checkpoint});
      }
    }
  }
}

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

void pin_to_one_core() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(0, &cores);
  if (sched_setaffinity(0, sizeof cores, &cores) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot pin this process to a core");
  }
}

}  // namespace gpipe::bench
