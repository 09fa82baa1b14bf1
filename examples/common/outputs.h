#pragma once

#include "examples/common/training_options.h"

namespace gpipe::examples {

// What a training writes into options.output.
inline constexpr char kHistoryFile[] = "history.csv";
inline constexpr char kLatestSnapshot[] = "latest.snapshot";
inline constexpr char kBestSnapshot[] = "best.snapshot";

/// Tries all that a run will write, so that nothing fails for it after hours. Throws std::runtime_error that says what
/// cannot be written, and for an earlier training in options.output that the run neither goes on with nor may
/// overwrite.
void check_outputs(const TrainingOptions& options);

/// Removes the snapshots and the history of an earlier training, unless the run goes on with it.
void remove_earlier_training(const TrainingOptions& options);

}  // namespace gpipe::examples
