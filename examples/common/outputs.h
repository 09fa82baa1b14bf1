#pragma once

#include "examples/common/training_options.h"

namespace gpipe::examples {

// Files that a training writes into options.output.
inline constexpr char kHistoryFile[] = "history.csv";
inline constexpr char kLatestSnapshot[] = "latest.snapshot";
inline constexpr char kBestSnapshot[] = "best.snapshot";

/// Checks that the output files can be written, so that a run does not fail after hours of training.
/// Errors: std::runtime_error for a path that cannot be written, and for an earlier training in options.output, unless
/// the run resumes or overwrites it.
void check_outputs(const TrainingOptions& options);

/// With --overwrite, removes what an earlier training wrote: snapshots, history, event files and pictures. Other files
/// and drawn data stay. Does nothing if the run resumes the earlier training.
void remove_earlier_training(const TrainingOptions& options);

}  // namespace gpipe::examples
