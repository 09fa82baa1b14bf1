#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/gpipe.h"
#include "gpipe/ranks.h"

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
  std::string schedule = {};
};

/// The rows to measure, and how.
struct Options {
  std::vector<std::string> models;
  std::vector<int> stages = {2};
  std::vector<int> chunks;
  std::vector<std::string> checkpoints = {"never", "always"};
  std::vector<std::string> schedules;
  std::vector<std::int64_t> balance = {};  ///< layers per stage; empty: stages of equal measured time
  std::string device = "cpu";              ///< of all stages
  int repeats = 9;
};

/// Adds a flag for each option. The options' values are the defaults.
void add_flags(CLI::App& app, Options& options);

/// Calls `measure` for every combination of models, stages, chunks and checkpoint modes.
void for_each_row(const Options& options, const std::function<void(const Row&)>& measure);

/// Prints one line with a JSON object: the row, and lists of values by name.
void print(const char* bench, const Row& row, const std::map<std::string, std::vector<double>>& values);

/// Calls each function once to warm up, then all of them in turn, `repeats` times, so that disturbances of the machine
/// affect all of them. Returns the seconds per call, by function and repeat; on a GPU until its work is done.
std::vector<std::vector<double>> interleave(const std::vector<std::function<void()>>& functions, int repeats);

/// A model to benchmark, and one mini-batch for it. In brackets the sizes on a GPU.
///
///   tiny       16 x Linear(8, 8); 8 rows per micro-batch: a step is little but overhead
///   mlp        16 layers, each Linear(1024, 1024) and ReLU; 1,024 rows [4096 wide; 8,192 rows]
///   unet       models::unet, depth 4, 16 channels at full resolution; 16 images of 3x96x96 [64 channels; 192x192]
///   resnet18   models::resnet18; 16 images of 3x64x64 [224x224] per micro-batch
///   resnet50   models::resnet50; the same images (with fewer, PyTorch's 1x1 convolutions use a slow kernel)
struct Subject {
  torch::nn::Sequential model;
  torch::Tensor input;
  std::int64_t split_size;  ///< samples per micro-batch
};

/// Makes the model with fresh weights, and a mini-batch of `chunks` equal micro-batches, on a device. Errors:
/// std::invalid_argument if the mini-batch cannot be split equally. REQUIRES: the name is one of those above.
Subject subject(const std::string& name, int chunks, torch::Device device);

/// Clears the gradients, then runs a step under the pipeline's schedule, with the sum of the output as the loss.
void step(GPipe& pipe, const torch::Tensor& input);

/// A program's main(): parses the command line, gives PyTorch one thread and calls `run`. Returns the exit code. Prints
/// errors as one line on standard error.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& run);

}  // namespace gpipe::bench
