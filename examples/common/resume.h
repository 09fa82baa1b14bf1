#pragma once

#include <map>
#include <optional>
#include <string>

#include "examples/common/options.h"
#include "gpipe/snapshot.h"

namespace gpipe::examples {

// Files that a training writes into options.output, besides epoch_NNN.png.
inline constexpr char kHistoryFile[] = "history.csv";
inline constexpr char kLatestSnapshot[] = "latest.snapshot";
inline constexpr char kBestSnapshot[] = "best.snapshot";

/// The flags, with their values, that decide the result of a training. Snapshots store them. How the model is run, such
/// as its stages and schedule, is not part of it.
using Identity = std::map<std::string, std::string>;

/// Checks that a snapshot is of this training, of any number of epochs.
/// Errors: std::runtime_error for the first flag that is missing or differs.
void check_identity(const Identity& identity, const Snapshot& snapshot, const std::filesystem::path& path);

/// Reads the snapshot of --resume; std::nullopt if it is not given. --resume auto becomes the path of the output
/// folder's snapshot, or none: the first process looks, and tells the others. Errors: std::runtime_error for a file
/// that is missing, damaged or of another training.
std::optional<Snapshot> read_resumed(TrainingOptions& options, const Identity& identity);

/// Creates the output folder. Errors: std::runtime_error if it holds an earlier training that the run neither resumes
/// nor overwrites, or if it cannot be created.
void prepare_output(const TrainingOptions& options);

/// With --overwrite, removes what an earlier training wrote. Other files and drawn data stay. Does nothing if the run
/// resumes the earlier training.
void remove_earlier_training(const TrainingOptions& options);

}  // namespace gpipe::examples
