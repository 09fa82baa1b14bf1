#pragma once

#include <torch/types.h>

#include "balance/plan.h"
#include "balance/profiler.h"

namespace gpipe {

/// The value of RunOptions::copies for workers on these devices: whether any two consecutive devices differ.
GPIPE_API bool copies_between(const std::vector<torch::Device>& devices);

/// How to measure a model in order to plan.
struct MeasureOptions {
  /// Numbers of micro-batches to try. Empty: 4, 8, 2, 16, 1 and 32, in this order, as far as samples, model and time allow.
  TORCH_ARG(std::vector<int>, chunks);
  /// How many of the best plans run for a few steps. The fastest of them becomes the first plan. 0: none runs.
  TORCH_ARG(int, pilots) = 3;
  /// Options of the profiles. `seconds` and `progress` cover all profiles together; `workers` is ignored.
  TORCH_ARG(ProfileOptions, profile) = ProfileOptions().seconds(60);
};

/// Profiles a model at several micro-batch sizes, plans its training with a worker per device, and runs the best plans
/// for a few steps. The sample is a mini-batch. `options.samples`, `chunks` and `copies` are set from the sample and the
/// devices, and so are `devices` if they have no names. Plans that fail when they run, e.g. because memory runs out, are left out.
///
/// Measures on the first device, as if all were equal; on a CPU, all stages at once. Errors: as profile() and plan().
GPIPE_API Plans plan(const Model& model, const Value& sample, const std::vector<torch::Device>& devices,
                     PlanOptions options = {}, const MeasureOptions& measuring = {});

}  // namespace gpipe
