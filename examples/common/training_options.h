#pragma once

#include <CLI/App.hpp>
#include <cstdint>
#include <filesystem>
#include <string>

#include "examples/common/pipeline_options.h"
#include "gpipe/schedule/generators.h"

namespace gpipe::examples {

/// The options of every training program.
struct TrainingOptions : PipelineOptions {
  std::filesystem::path output;
  bool overwrite = false;  ///< replace an earlier training in `output`
  int epochs = 1;
  double learning_rate = 1e-3;
  std::string learning_rate_schedule = "cosine";  ///< or "plateau"
  double clip = 0;                                ///< largest norm of the gradient; 0: no limit
  bool amp = false;                               ///< autocast in bfloat16
  std::uint64_t seed = 0;
  std::filesystem::path resume;     ///< a snapshot to continue from, or kAuto until read_start(); empty: none
  bool auto_resume = false;         ///< whether --resume was kAuto; set by read_start()
  std::filesystem::path load;       ///< a snapshot to take the weights from; empty: none
  std::int64_t snapshot_every = 0;  ///< steps of an epoch between snapshots; 0: only after each epoch
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  std::filesystem::path trace;  ///< file for the timeline of a step; empty: none
  bool profile = false;         ///< print the costs of each layer
};

/// Adds a flag for each option; see add_pipeline_options().
void add_training_options(CLI::App& app, TrainingOptions& options);

}  // namespace gpipe::examples
