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

inline constexpr char kAuto[] = "auto";       ///< the fastest balance, chunks and checkpoint mode
inline constexpr char kByTime[] = "by-time";  ///< stages that take equal time
inline constexpr char kBySize[] = "by-size";  ///< stages that need equal memory

/// How a program's model is to run.
struct PipelineOptions {
  std::int64_t batch_size = 1;
  int stages = 2;
  std::string balance = kByTime;     ///< kAuto, kByTime or kBySize; empty: as `layers` says
  std::vector<std::int64_t> layers;  ///< per stage
  std::int64_t chunks = 2;
  std::vector<torch::Device> devices;  ///< one a stage; empty: the GPUs in turn, or the CPU
};

inline constexpr char kPipelineGroup[] = "Pipeline";

/// Gives the program a flag for each, with the values that `options` holds as defaults. Options that contradict each
/// other are a CLI::ValidationError of the parse. The first that a program adds: it also sets what all flags share.
void add_pipeline_options(CLI::App& app, PipelineOptions& options);

/// What --devices takes: one device a stage, or one for all. Errors: CLI::ValidationError.
std::vector<torch::Device> to_devices(const std::string& text, int stages);

/// One device a stage: the options', or the GPUs in turn, or the CPU.
std::vector<torch::Device> place(const PipelineOptions& options);

/// A line about the model, and one about each of its stages: layers, device, parameters.
void print_stages(std::ostream& out, const std::string& name, const GPipe& pipe);

/// A program's main(): parses the command line, then calls `run`, which returns the exit code. Errors become one line on
/// standard error and an exit code that is not 0, also where standard output or a file outgrows a limit of its size.
int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& run);

}  // namespace gpipe::examples
