#pragma once

#include <torch/types.h>

#include <CLI/App.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "gpipe/schedule/generators.h"

namespace gpipe::examples {

/// What every training program can be told.
struct TrainingOptions {
  std::filesystem::path output;
  int epochs = 1;
  std::int64_t batch_size = 1;
  double learning_rate = 1e-3;
  std::string schedule = "cosine";  ///< or "plateau"
  double clip = 0;                  ///< largest norm of the gradient; 0: any
  std::uint64_t seed = 0;
  int workers = 1;
  std::filesystem::path resume;  ///< a snapshot to go on from; empty: none
  std::filesystem::path load;    ///< a snapshot to take the weights of; empty: none

  int stages = 2;
  std::vector<std::int64_t> balance;  ///< layers per stage; empty: by measured time
  std::int64_t chunks = 2;
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  std::vector<torch::Device> devices;
  std::filesystem::path trace;  ///< empty: none
};

/// Gives the program a flag for each, with the values that `options` holds as defaults. Options that contradict each
/// other are a CLI::ValidationError of the parse.
void add_training_options(CLI::App& app, TrainingOptions& options);

/// A program's main(): parses the command line, then calls `run`, which returns the exit code. Exceptions become one line
/// on standard error and exit code 1.
int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& run);

}  // namespace gpipe::examples
