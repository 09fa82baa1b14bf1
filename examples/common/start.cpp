#include "examples/common/start.h"

#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/flags.h"

namespace gpipe::examples {

Identity make_identity(Identity own, const TrainingOptions& options) {
  own["--batch-size"] = absl::StrCat(options.batch_size);
  own["--seed"] = absl::StrCat(options.seed);
  own["--schedule"] = options.schedule;
  own["--epochs"] = absl::StrCat(options.epochs);
  own["--learning-rate"] = to_flag(options.learning_rate);
  own["--clip"] = to_flag(options.clip);
  own["--amp"] = absl::StrCat(options.amp);
  return own;
}

void check_identity(Identity identity, const Snapshot& snapshot, const std::filesystem::path& path) {
  identity.erase("--epochs");
  for (const auto& [flag, value] : identity) {
    if (snapshot.options.count(flag) > 0) continue;
    throw std::runtime_error(path.string() + " is not of this program: it does not say " + flag);
  }
  for (const auto& [flag, value] : identity) {
    const auto& was = snapshot.options.at(flag);
    if (was == value) continue;
    throw std::runtime_error(path.string() + " was made with " + flag + " " + was + ", not " + value +
                             "; give the same, or start afresh");
  }
}

std::optional<Snapshot> read_start(const TrainingOptions& options, const Identity& identity, torch::nn::Module& model) {
  if (options.resume.empty()) {
    if (!options.load.empty()) restore_model(model, read_snapshot(options.load).model);
    return std::nullopt;
  }
  auto snapshot = read_snapshot(options.resume);
  check_identity(identity, snapshot, options.resume);
  if (snapshot.epoch >= options.epochs) {
    throw std::runtime_error(absl::StrCat(options.resume.string(), " has ", snapshot.epoch,
                                          " epochs already, and --epochs is ", options.epochs,
                                          ": nothing is left to train; give more --epochs"));
  }
  restore_model(model, snapshot.model);
  return snapshot;
}

}  // namespace gpipe::examples
