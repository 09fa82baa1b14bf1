#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "balance/profiler.h"
#include "balance/search.h"

namespace gpipe {

struct SuggestOptions {
  /// Numbers of chunks to try. Empty: 1, 2, 4, .. 32, as far as the mini-batch can be cut and the model takes what that
  /// gives.
  TORCH_ARG(std::vector<int>, chunks);
  TORCH_ARG(std::vector<Checkpoint>, checkpoints) = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways};
  /// Most bytes on one device, CPU stages counted as one each; 0: as many as it may take.
  TORCH_ARG(std::int64_t, memory_limit) = 0;
  /// Bytes a second between devices; 0: what is sent is there at once.
  TORCH_ARG(double, bandwidth) = 0;
  /// How each profile is made. Its `seconds` and `progress` are those of all profiles together, so that a minute is
  /// more to the point than its own default.
  TORCH_ARG(ProfileOptions, profile) = ProfileOptions().seconds(60);
};

/// Whether stages on these devices send copies: whether some neighbours are not the same.
bool copies_between(const std::vector<torch::Device>& devices);

/// Profiles a model at several micro-batch sizes and searches for the fastest way to train it on the sample, a
/// mini-batch, over devices of which each gets one stage: balance, chunks and checkpoint mode. It is measured on the
/// first device, to which the others are taken to be alike; on a CPU as many stages at once as there are CPU stages.
/// Errors: those of profile() and search().
Suggestion suggest(const Model& model, const Value& sample, const std::vector<torch::Device>& devices,
                   const SuggestOptions& options = {});

/// A candidate, and what it took.
struct Measured {
  Candidate candidate;
  double seconds = 0;  ///< of a step, the median
};

/// Runs steps of the first few candidates that fit and returns them with what they took, fastest first. The model is
/// left as profile() leaves it. `intraop_threads` is as in GPipeOptions: give what the profiles had. Errors:
/// std::invalid_argument for numbers that are not positive; std::runtime_error with the reason when nothing fits; what
/// GPipe and the layers throw.
std::vector<Measured> refine(const Model& model, const Value& sample, const std::vector<torch::Device>& devices,
                             const Suggestion& suggestion, int candidates = 3, int repeats = 5,
                             int intraop_threads = 0);

}  // namespace gpipe
