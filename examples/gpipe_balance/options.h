#pragma once

#include <torch/types.h>

#include <CLI/App.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "balance/profiler.h"
#include "balance/search.h"
#include "balance/stage_cost.h"

namespace gpipe::examples::balance {

/// A schedule's name that stands for forward() and its backward.
inline constexpr char kForward[] = "forward";

/// The values of all verbs' flags. Each verb uses those that it adds.
struct Options {
  std::string model = "unet";
  std::string size = "96x96";  ///< of images, in pixels
  std::int64_t channels = 64;
  std::int64_t batch_size = 16;
  int chunks = 4;
  std::vector<int> chunks_to_try;  ///< empty: the verb's default
  int stages = 2;
  std::string schedule = kForward;  ///< of step(); or kForward, or kAnySchedule
  std::vector<std::string> schedules_to_try = {kForward};
  std::string save_schedule;  ///< a file; empty: do not save
  int stages_per_worker = 1;
  std::string devices;  ///< empty: the GPUs in turn, or the CPU
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  std::string by = "time";
  double bandwidth = 0;     ///< GB/s
  std::int64_t memory = 0;  ///< bytes
  double seconds = 10;
  double param_scale = 4;
  int refine = 0;
  int near = 4;
  std::string profile;
  std::string cluster;                ///< a file; empty: plan for the devices
  std::vector<std::string> profiles;  ///< files
  std::vector<int> micro_batches = {1, 2, 4, 8, 16, 32};
  std::string output;
  bool layers = false;
  bool json = false;

  /// Images per micro-batch, for a number of chunks.
  std::vector<std::int64_t> sizes(int chunks) const;
  /// One device per worker.
  std::vector<torch::Device> place() const;
  /// The limits of a search. Errors: as scheduling().
  SearchOptions search() const;
  /// With the placement, unless the schedule is kAnySchedule. Errors: std::invalid_argument for a schedule or a number of
  /// stages that does not fit.
  Scheduling scheduling() const;
  RunOptions run(int chunks, Checkpoint mode) const;
  /// The devices of one pipeline.
  Network network() const;
  ProfileOptions profiling() const;
};

/// Adds the flags that all verbs have.
void add_common_flags(CLI::App& app, Options& options);

// Flags that some verbs have.
void add_chunks_flag(CLI::App& app, Options& options);
/// Several numbers of chunks. `by_default` names those that are tried without the flag.
void add_chunks_list(CLI::App& app, Options& options, const std::string& by_default);
void add_bandwidth_flag(CLI::App& app, Options& options);
void add_memory_limit_flag(CLI::App& app, Options& options);
/// --schedule and --stages-per-worker. With `any`, the schedule can be kAnySchedule, which is then the default.
void add_schedule_flags(CLI::App& app, Options& options, bool any = false);
/// --schedule for one or several schedules, and --stages-per-worker.
void add_schedule_list(CLI::App& app, Options& options);
void add_layers_flag(CLI::App& app, Options& options);

}  // namespace gpipe::examples::balance
