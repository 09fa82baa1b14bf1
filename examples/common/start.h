#pragma once

#include <torch/nn/module.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "examples/common/training_options.h"
#include "gpipe/snapshot/snapshot.h"

namespace gpipe::examples {

/// What a run is, by flag: the options that change its course, and the program's own. A snapshot keeps it: a run with
/// others would not go on but begin something else.
using Identity = std::map<std::string, std::string>;

/// The program's own flags, joined by those of every training.
Identity make_identity(Identity own, const TrainingOptions& options);

/// That a snapshot is of such a run, of as many epochs or others. Throws std::runtime_error for the first flag that
/// differs.
void check_identity(Identity identity, const Snapshot& snapshot, const std::filesystem::path& path);

/// Gives the model the weights of the snapshot to resume or to load, if there is one. Returns the snapshot to resume.
///
/// Errors: std::runtime_error for a snapshot that is missing, damaged or not of such a run, or that has no epochs left
/// to train; std::invalid_argument for weights of another model.
std::optional<Snapshot> read_start(const TrainingOptions& options, const Identity& identity, torch::nn::Module& model);

}  // namespace gpipe::examples
