#pragma once

#include <torch/types.h>

#include <CLI/App.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/gpipe.h"
#include "gpipe/ranks.h"

namespace gpipe::examples {

/// How to run a program's model.
struct PipelineOptions {
  std::int64_t batch_size = 1;
  int stages = 2;
  std::vector<std::int64_t> layers = {};  ///< per stage; empty: stages of equal measured time
  std::int64_t chunks = 2;
  std::string schedule = "gpipe";
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  std::vector<std::string> devices = {};   ///< of this process's workers, or one for all; empty: GPipe's default
  std::shared_ptr<Ranks> ranks = nullptr;  ///< the processes that train together; null: this one alone
};

/// The options of every training program.
struct TrainingOptions : PipelineOptions {
  std::filesystem::path output;
  int epochs = 1;
  double learning_rate = 1e-3;
  bool amp = false;  ///< autocast in bfloat16
  std::uint64_t seed = 0;
  std::filesystem::path resume;     ///< a snapshot to continue from, or "auto"; empty: none
  bool watch = false;               ///< show each step
  std::int64_t snapshot_every = 0;  ///< steps of an epoch between snapshots; 0: only after each epoch
};

// A training can run in several processes, which torchrun starts. The first one, rank 0, writes the files and prints.
// The others print only errors.

/// Whether this process writes and prints.
inline bool is_first(const std::shared_ptr<Ranks>& ranks) { return !ranks || ranks->rank() == 0; }

/// Calls `work` in the first process. The others wait for it. Errors: as `work`, in the others a
/// std::runtime_error.
inline void run_first(const std::shared_ptr<Ranks>& ranks, const std::function<void()>& work) {
  if (is_first(ranks)) work();
  if (ranks) ranks->share("");
}

/// Checks a finite number from `low` to `high`, for CLI::Option::check().
CLI::Validator in_range(double low, double high = 1 << 20);

/// Adds a flag for each option but checkpoint and schedule, with the values in `options` as defaults. Call it
/// before adding other flags, because it also configures what all flags share.
void add_pipeline_options(CLI::App& app, PipelineOptions& options);
/// Adds all flags of a training program.
void add_training_options(CLI::App& app, TrainingOptions& options);

/// A program's main(): parses the command line and calls `run`, which returns the exit code. Errors become one line on
/// standard error and exit code 1, including errors of standard output and of files that reach a size limit.
int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& run);

}  // namespace gpipe::examples
