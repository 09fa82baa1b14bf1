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
#include "gpipe/schedules.h"

namespace CLI {
class App;
}

namespace gpipe::bench {

inline constexpr char kForward[] = "forward";  ///< stands for a schedule: forward() and backward() instead of step()

/// The subject of a measurement.
struct Row {
  std::string model;
  int stages = 2;
  int chunks = 1;
  Checkpoint checkpoint = Checkpoint::kNever;
  std::string schedule = kForward;
  int stages_per_worker = 1;
};

/// The rows to measure, and how.
struct Options {
  std::vector<std::string> models;
  std::vector<int> stages = {2};
  std::vector<int> chunks;
  std::vector<std::string> checkpoints = {"never", "always"};
  std::vector<std::string> schedules = {kForward};
  std::vector<std::int64_t> balance = {};  ///< layers per stage; empty: the program's choice
  std::string device = "cpu";              ///< of all stages
  int repeats = 9;
  // Of the programs that are compared with peers.
  int stages_per_worker = 1;
  bool steps_only = false;  ///< print only each step of the pipeline
  bool over_ranks = false;  ///< run over the processes that torchrun has started
  int replicas = 1;         ///< among which these are divided
};

/// Adds the flags that all programs have. The options' values are the defaults.
void add_flags(CLI::App& app, Options& options);
/// Adds the flags of the programs that are compared with peers.
void add_peer_flags(CLI::App& app, Options& options);

/// Joins the processes that torchrun has started; null without --over-ranks.
std::shared_ptr<Ranks> join_ranks(const Options& options);

/// Calls `measure` for every combination of models, stages, chunks and checkpoint modes.
void for_each_row(const Options& options, const std::function<void(const Row&)>& measure);

/// One line of output.
struct Measurement {
  std::string bench;
  Row row;
  std::string unit;
  std::vector<double> values;  ///< one per repeat; not empty
};

/// Prints one line with a JSON object: the row, "value" (the median), "unit", "min", "max", "repeats".
void print(const Measurement& measurement);

/// Prints the line of a run with steps_only: the row, and lists of values by name.
void print_steps(const Row& row, const std::map<std::string, std::vector<double>>& values);

/// Calls each function once to warm up, then all of them in turn, `repeats` times, so that disturbances of the machine
/// affect all of them. Returns the seconds per call, by function and repeat; on a GPU until its work is done.
std::vector<std::vector<double>> interleave(const std::vector<std::function<void()>>& functions, int repeats);

/// Returns the quotient of each pair of values. REQUIRES: both have the same number of values.
std::vector<double> quotients(const std::vector<double>& values, const std::vector<double>& divisors);

/// A model to benchmark, and one mini-batch for it. In brackets the sizes on a GPU.
///
///   mlp        16 layers, each Linear(1024, 1024) and ReLU; 1,024 rows [4096 wide; 8,192 rows]
///   unet       models::unet, depth 4, 16 channels at full resolution; 16 images of 3x96x96 [64 channels; 192x192]
///   resnet18   models::resnet18; 16 images of 3x64x64 [224x224] per micro-batch
///   resnet50   models::resnet50; the same images (with fewer, PyTorch's 1x1 convolutions use a slow kernel)
///   encoder    8 blocks of a transformer's encoder, 256 wide, 4 heads; 32 sequences of 64
struct Subject {
  std::string name;
  torch::nn::Sequential model;
  torch::Tensor input;
  std::int64_t split_size;  ///< samples per micro-batch
};

/// Makes the model with fresh weights, and a mini-batch of `chunks` equal micro-batches, on a device. Errors:
/// std::invalid_argument if the mini-batch cannot be split equally. REQUIRES: the name is one of those above.
Subject subject(const std::string& name, int chunks, torch::Device device);

/// Makes a pipeline for the row on the input's device, with one thread per stage; over these ranks, unless they are
/// null.
GPipe make_pipe(const Subject& subject, const std::vector<std::int64_t>& balance, const Row& row,
                const std::shared_ptr<Ranks>& ranks = nullptr);

/// Clears the gradients of a model or a pipeline.
template <typename Model>
void clear_gradients(Model& model) {
  for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
}

/// Clears the gradients, then runs a forward and a backward from the sum of the output, of a model or a pipeline.
template <typename Model>
void step(Model& model, const torch::Tensor& input) {
  clear_gradients(model);
  model->forward(input).sum().backward();
}

/// The loss of step(): the sum of the output.
torch::Tensor sum_loss(const torch::Tensor& output, const torch::Tensor& target);

/// Runs step() of a pipeline with sum_loss(). Does not clear the gradients.
void run_schedule(GPipe& pipe, const torch::Tensor& input);

/// Clears the gradients, then runs a step under the schedule, or a forward and a backward for kForward.
void step(GPipe& pipe, const torch::Tensor& input, const std::string& schedule);

}  // namespace gpipe::bench
