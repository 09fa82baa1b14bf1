#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "gpipe/schedule/generators.h"

namespace CLI {
class App;
}

namespace gpipe::bench {

/// What a measurement is of.
struct Row {
  std::string model;
  int stages = 2;
  int chunks = 1;
  Checkpoint checkpoint = Checkpoint::kNever;
};

/// Which rows to measure, how often, and how to print them.
struct Options {
  std::vector<std::string> models;
  std::vector<int> stages = {2};
  std::vector<int> chunks;
  std::vector<Checkpoint> checkpoints;
  std::vector<std::int64_t> balance = {};  ///< layers of each stage; empty: cut by measured times
  int repeats = 9;
  bool steps_only = false;  ///< print the figure of each step of the pipeline: for peers to be put beside
};

/// Flags that all programs have, for the options, whose present values are the defaults, and --reuse, which calls
/// reuse_cpu_memory().
void add_flags(CLI::App& app, Options& options);

// Flags that only some have.
void add_model_flag(CLI::App& app, Options& options);
void add_balance_flag(CLI::App& app, Options& options);
void add_steps_flag(CLI::App& app, Options& options);

/// --short, which sets the options to others.
void add_short_flag(CLI::App& app, Options& options, std::vector<Checkpoint> checkpoints);

/// A program's main(): parses the command line and, with one thread for PyTorch, measures. Returns the exit code; an
/// error is a line on standard error.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& measure);

/// Every combination that the options ask for.
void for_each_row(const Options& options, const std::function<void(const Row&)>& measure);

/// A line of output: what was measured, and how.
struct Measurement {
  std::string bench;
  Row row;
  std::string unit;
  std::vector<double> values;   ///< one a repeat; at least one
  std::optional<double> bound;  ///< what the simulated program reaches, in the same unit
};

/// One JSON object on a line of its own: the fields, with the values as "value" (their median), "min", "max" and
/// "repeats", and with a bound "bound" and "of_bound".
void print(std::ostream& out, const Measurement& measurement);

/// The line of a run with steps_only: the row, and each step's figures under `name`.
void print_steps(std::ostream& out, const Row& row, const std::string& name, const std::vector<double>& values);

/// Calls each function once to warm up, then all of them in turn, `repeats` times: what disturbs the machine disturbs
/// all alike. Returns the seconds of each call, by function and repeat.
std::vector<std::vector<double>> interleave(const std::vector<std::function<void()>>& functions, int repeats);

/// From now on this process runs on one core. Call before any thread is started.
void pin_to_one_core();

}  // namespace gpipe::bench
