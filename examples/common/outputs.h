#pragma once

#include "examples/common/training_options.h"

namespace gpipe::examples {

// Files that a training writes into options.output.
inline constexpr char kHistoryFile[] = "history.csv";
inline constexpr char kLatestSnapshot[] = "latest.snapshot";
inline constexpr char kBestSnapshot[] = "best.snapshot";

/// The snapshot in the folder from which a training can continue; an empty path if there is none.
std::filesystem::path latest_snapshot(const std::filesystem::path& folder);

/// Checks that the output files can be written, so that a run does not fail after hours of training.
/// Errors: std::runtime_error for a path that cannot be written, and for an earlier training in options.output, unless
/// the run resumes or overwrites it. With --resume auto, a history of one epoch without a snapshot is not an earlier
/// training: a run that is killed at the end of its first epoch leaves it.
void check_outputs(const TrainingOptions& options);

/// With --overwrite, removes what an earlier training wrote: snapshots, history, event files and pictures. Other files
/// and drawn data stay. Does nothing if the run resumes the earlier training.
void remove_earlier_training(const TrainingOptions& options);

}  // namespace gpipe::examples
