#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <CLI/App.hpp>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "balance/predict.h"
#include "gpipe/gpipe.h"

namespace gpipe::examples {

inline constexpr char kAuto[] = "auto";       ///< the fastest balance or schedule; of --resume, the latest snapshot
inline constexpr char kByTime[] = "by-time";  ///< stages that take equal time
inline constexpr char kBySize[] = "by-size";  ///< stages that need equal memory

/// How to run a program's model.
struct PipelineOptions {
  std::int64_t batch_size = 1;
  int stages = 2;             ///< workers, if the schedule is kAuto
  int stages_per_worker = 1;  ///< must divide `stages`
  std::string schedule =
      GPipeOptions().schedule();     ///< a name; @FILE, which must leave stages_per_worker at 1; or kAuto
  std::string balance = kByTime;     ///< kAuto, kByTime or kBySize; empty: given by `layers`
  std::vector<std::int64_t> layers;  ///< per stage
  std::int64_t chunks = 2;
  std::vector<torch::Device> devices;  ///< one per worker; empty: the GPUs in turn, or the CPU
  int replicas = 1;                    ///< equal pipelines, each for a part of the mini-batch
  std::shared_ptr<Ranks> ranks;        ///< the processes that train together; null: this one alone
};

inline constexpr char kPipelineGroup[] = "Pipeline";

/// Adds flags for all options except the schedule and stages_per_worker, with the values in `options` as defaults. Call
/// it before adding other flags, because it also configures what all flags share. Parsing throws CLI::ValidationError for
/// options that contradict each other, and std::invalid_argument for a schedule from a file that does not fit.
void add_pipeline_options(CLI::App& app, PipelineOptions& options);

/// The names of all schedules, for help texts and messages.
std::string schedule_names();

/// Parses --devices: `count` devices, or one for all. Each is for a `unit`: a stage or a worker. Errors:
/// CLI::ValidationError.
std::vector<torch::Device> to_devices(const std::string& text, int count, const std::string& unit);

/// The number of workers that the schedule and stages_per_worker need. Errors: std::invalid_argument for a schedule that
/// is unknown or does not fit.
int worker_count(const PipelineOptions& options);

/// One device per worker: those of the options, or the GPUs in turn, or the CPU.
std::vector<torch::Device> place(const PipelineOptions& options);

/// Prints a line about the model, whose children are the layers, and one per stage: layers, parameters, device, or the rank
/// if that is another one; the worker, unless each stage s is on worker s; and the predicted time and memory, if there is a
/// prediction. If workers have several stages, their memory is on a line of its own.
void print_stages(std::ostream& out, const std::string& name, const torch::nn::Module& model, const GPipe& pipe,
                  const std::optional<Prediction>& prediction = std::nullopt);

/// A program's main(): parses the command line and calls `run`, which returns the exit code. Errors become one line on
/// standard error and a non-zero exit code, including errors of standard output and of files that reach a size limit.
/// A program that fails leaves no empty folders behind.
int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& run);

}  // namespace gpipe::examples
