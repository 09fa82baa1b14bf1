#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "examples/common/options.h"
#include "gpipe/snapshot.h"

namespace gpipe::examples {

// What a training writes into options.output, besides epoch_NNN.png: a file, and folders with snapshots.
inline constexpr char kHistoryFile[] = "history.csv";
inline constexpr char kLatestSnapshot[] = "latest";
inline constexpr char kBestSnapshot[] = "best";

/// The flags, with their values, that decide the result of a training. Snapshots store them. How the model is run, such
/// as its stages and schedule, is not part of it.
using Identity = std::map<std::string, std::string>;

/// Checks that a snapshot is of this training, of any number of epochs.
/// Errors: std::runtime_error for the first flag that is missing or differs.
void check_identity(const Identity& identity, const nlohmann::json& saved, const std::filesystem::path& path);

/// Reads what the program saved in a snapshot besides the model and the optimizer: "options", which are the identity, and
/// the position of the training. Errors: std::runtime_error for a folder or file that is missing, damaged or of another
/// program.
nlohmann::json read_saved(const std::filesystem::path& path);

/// Reads the snapshot of --resume; returns std::nullopt without --resume. Replaces --resume auto by the path of the snapshot
/// in the output folder, if there is one: the first process looks for it and tells the others. Errors: as read_saved(), and
/// for a snapshot of another training.
std::optional<nlohmann::json> read_resumed(TrainingOptions& options, const Identity& identity);

/// Creates the output folder. Errors: std::runtime_error if it holds an earlier training that the run does not resume,
/// or if it cannot be created.
void prepare_output(const TrainingOptions& options);

}  // namespace gpipe::examples
