#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <CLI/App.hpp>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe::examples {

/// How a program's model is to run.
struct PipelineOptions {
  std::int64_t batch_size = 1;
  int stages = 2;
  std::vector<std::int64_t> balance;  ///< layers per stage; empty: by measured time
  std::int64_t chunks = 2;
  std::vector<torch::Device> devices;  ///< one a stage; empty: the GPUs in turn, or the CPU
};

inline constexpr char kPipelineGroup[] = "Pipeline";

/// Gives the program a flag for each, with the values that `options` holds as defaults. Options that contradict each
/// other are a CLI::ValidationError of the parse. The first that a program adds: it also sets what all flags share.
void add_pipeline_options(CLI::App& app, PipelineOptions& options);

/// Cuts the model as the options say, or so that stages take equal time on a micro-batch of images of that shape.
GPipe make_pipe(const torch::nn::Sequential& model, const PipelineOptions& options,
                std::vector<std::int64_t> image_shape, Checkpoint checkpoint);

/// A line about the model, and one about each of its stages: layers, device, parameters.
void print_plan(std::ostream& out, const std::string& name, const GPipe& pipe);

/// A number as the command line would have it, with all its digits.
std::string to_flag(double value);

/// A program's main(): parses the command line, then calls `run`, which returns the exit code. Exceptions become one
/// line on standard error and exit code 1.
int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& run);

}  // namespace gpipe::examples
