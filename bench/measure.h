#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "gpipe/schedule/generators.h"
#include "gpipe/simulator.h"
#include "gpipe/timeline.h"

namespace CLI {
class App;
}

namespace gpipe::bench {

/// The subject of a measurement.
struct Row {
  std::string model;
  int stages = 2;
  int chunks = 1;
  Checkpoint checkpoint = Checkpoint::kNever;
  std::string schedule = {};  ///< of step(); empty: forward() and backward() instead
  int stages_per_worker = 1;
};

/// The rows to measure, and how.
struct Options {
  std::vector<std::string> models;
  std::vector<int> stages = {2};
  std::vector<int> chunks;
  std::vector<Checkpoint> checkpoints;
  std::vector<std::int64_t> balance = {};  ///< layers per stage; empty: by measured times
  std::string schedule = {};               ///< of step(); empty: forward() and backward() instead
  int stages_per_worker = 1;
  int repeats = 9;
  bool steps_only = false;  ///< print only each step of the pipeline, to compare with peers
  bool over_ranks = false;  ///< run over the processes that torchrun has started
  int replicas = 1;         ///< among which these are divided
};

/// Adds the flags that all programs have. The options' values are the defaults.
void add_flags(CLI::App& app, Options& options);

// Flags that some programs have.
void add_model_flag(CLI::App& app, Options& options);
void add_stages_flag(CLI::App& app, Options& options);
/// REQUIRES: add_stages_flag() was called.
void add_balance_flag(CLI::App& app, Options& options);
/// --schedule and --stages-per-worker.
void add_schedule_flag(CLI::App& app, Options& options);
void add_steps_flag(CLI::App& app, Options& options);
void add_ranks_flag(CLI::App& app, Options& options);

/// Adds --short, which changes the options to fewer rows and repeats.
void add_short_flag(CLI::App& app, Options& options, std::vector<Checkpoint> checkpoints);

/// A program's main(): parses the command line, gives PyTorch one thread and calls `measure`. Returns the exit code.
/// Prints errors as one line on standard error.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& measure);

/// Calls `measure` for every combination of the options' values.
void for_each_row(const Options& options, const std::function<void(const Row&)>& measure);

/// One line of output.
struct Measurement {
  std::string bench;
  Row row;
  std::string unit;
  std::vector<double> values;        ///< one per repeat; not empty
  std::optional<double> bound = {};  ///< of the simulated program, in the same unit
  std::optional<double> limit = {};  ///< the largest median that passes

  bool passes() const;
};

/// Prints one line with a JSON object: the row, "value" (the median), "unit", "min", "max", "repeats"; if there is a
/// bound, "bound" and "of_bound" (value / bound); if there is a limit, "limit" and "passes".
void print(std::ostream& out, const Measurement& measurement);

/// Prints the line of a run with steps_only: the row, and the values per step under `name`.
void print_steps(std::ostream& out, const Row& row, const std::string& name, const std::vector<double>& values);

/// Calls each function once to warm up, then all of them in turn, `repeats` times, so that disturbances of the machine
/// affect all of them. Returns the seconds per call, by function and repeat.
std::vector<std::vector<double>> interleave(const std::vector<std::function<void()>>& functions, int repeats);

/// Returns the quotient of each pair of values. REQUIRES: both have the same number of values.
std::vector<double> quotients(const std::vector<double>& values, const std::vector<double>& divisors);

/// Returns the time of each action while the other workers are busy: the median over the spans that overlapped their
/// work most. Edges cost nothing. REQUIRES: the timeline is of training steps.
Costs costs_of(const Timeline& timeline, int stages);

/// Pins this process to one core. REQUIRES: no other thread has started.
void pin_to_one_core();

}  // namespace gpipe::bench
