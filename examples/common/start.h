#pragma once

#include <torch/nn/module.h>

#include <filesystem>
#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "examples/common/training_options.h"
#include "gpipe/snapshot.h"

namespace gpipe::examples {

/// The flags, with their values, that decide the result of a training. A snapshot stores them. A run with other values
/// cannot continue it. How the model is run, such as its stages and schedule, is not part of it.
using Identity = std::map<std::string, std::string>;

/// The program's own flags, and those of every training.
Identity make_identity(Identity own, const TrainingOptions& options);

/// Checks that a snapshot is of this training, of any number of epochs.
/// Errors: std::runtime_error for the first flag that is missing or differs.
void check_identity(Identity identity, const Snapshot& snapshot, const std::filesystem::path& path);

/// Reads the snapshot of --resume, or otherwise of --load; std::nullopt if neither is given. Needs no model and no data,
/// so that a wrong file is found before anything slow. `columns` are those of history.csv. --resume auto becomes the path of
/// the output folder's snapshot, or none: the first process looks, and tells the others and `out`.
/// Errors: std::runtime_error for a file that is missing, damaged or not a snapshot; of --resume also for a snapshot of
/// another training, without a position in its epoch, or with no epochs left to train, unless --resume was auto.
std::optional<Snapshot> read_start(TrainingOptions& options, const Identity& identity,
                                   const std::vector<std::string>& columns, std::ostream& out);

/// Whether --resume auto has found a training with no epochs left to train. Says so.
bool is_finished(const TrainingOptions& options, const std::optional<Snapshot>& start, std::ostream& out);

/// Gives the model the snapshot's weights. With --resume it also checks the state of the optimizer and of the random
/// number generator. Errors: std::invalid_argument for a snapshot of another model.
void restore_start(const TrainingOptions& options, const Snapshot& snapshot, torch::nn::Module& model);

}  // namespace gpipe::examples
