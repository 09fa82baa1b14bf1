#pragma once

#include <torch/types.h>

#include "balance/profiler.h"
#include "balance/search.h"
#include "gpipe/api.h"

namespace gpipe {

struct SuggestOptions {
  /// Numbers of chunks to try. Empty: 4, 8, 2, 16, 1 and 32, in this order, as far as samples, model and time allow.
  TORCH_ARG(std::vector<int>, chunks);
  TORCH_ARG(std::vector<Checkpoint>, checkpoints) = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways};
  /// Most bytes per device, where each CPU worker counts as a device; 0 for no limit.
  TORCH_ARG(std::int64_t, memory_limit) = 0;
  /// Bandwidth between devices in bytes per second. 0: transfers take no time.
  TORCH_ARG(double, bandwidth) = 0;
  /// The schedule and the placement of all candidates. With kAnySchedule, a placement or stages per worker other than 1
  /// leave only the schedules that have them.
  TORCH_ARG(Scheduling, scheduling) = Scheduling{kAnySchedule};
  /// Options of the profiles. `seconds` and `progress` cover all profiles together; `workers` is ignored.
  TORCH_ARG(ProfileOptions, profile) = ProfileOptions().seconds(60);
};

/// The value of RunOptions::copies for workers on these devices: whether any two consecutive devices differ.
GPIPE_API bool copies_between(const std::vector<torch::Device>& devices);

/// Options of a search for workers on these devices; each CPU worker counts as one. Numbers are as in SuggestOptions.
GPIPE_API SearchOptions search_options(const std::vector<torch::Device>& devices, std::int64_t memory_limit,
                                       double bandwidth);

/// Profiles a model at several micro-batch sizes and searches for the fastest way to train it with a worker per device:
/// schedule, placement, balance, chunks, checkpoint mode. Also predicts it unpartitioned. The sample is a mini-batch.
///
/// Measures on the first device, as if all were equal; on a CPU, all stages at once. Errors: as profile(), search().
GPIPE_API Suggestion suggest(const Model& model, const Value& sample, const std::vector<torch::Device>& devices,
                             const SuggestOptions& options = {});

/// A candidate, and its measured time.
struct Measured {
  Candidate candidate;
  double seconds = 0;  ///< per step; the median
};

/// Runs `repeats` steps of each of the first candidates that fit, after a warm-up. Returns their times, fastest first.
/// Restores the model as profile() does. REQUIRES: the profiles' `intraop_threads`. `progress` is as in ProfileOptions.
/// Errors: std::invalid_argument for numbers that are not positive; std::runtime_error with the reason if nothing fits;
/// the errors of GPipe and the layers.
GPIPE_API std::vector<Measured> refine(const Model& model, const Value& sample,
                                       const std::vector<torch::Device>& devices, const Suggestion& suggestion,
                                       int candidates = 3, int repeats = 5, int intraop_threads = 0,
                                       const std::function<void(double)>& progress = {});

}  // namespace gpipe
