#include "examples/common/start.h"

#include <torch/optim/adam.h>

#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/flags.h"

namespace gpipe::examples {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& why) {
  throw std::runtime_error(path.string() + " is not a snapshot of this program: " + why);
}

// Without the history and the position in the epoch, a training cannot continue.
void check_progress(const Snapshot& snapshot, const std::vector<std::string>& columns,
                    const std::filesystem::path& path) {
  for (const auto& column : columns) {
    const auto found = snapshot.history.find(column);
    if (found == snapshot.history.end() || found->second.size() != static_cast<std::size_t>(snapshot.epoch)) {
      refuse(path, absl::StrCat("its history does not have ", snapshot.epoch, " epochs of ", column));
    }
  }
  const auto loss_sum = snapshot.history.find("loss_sum");
  if (loss_sum == snapshot.history.end() || loss_sum->second.size() != 1 || snapshot.position.count("batch") == 0 ||
      snapshot.position.count("images") == 0) {
    refuse(path, "it does not store its position in the epoch");
  }
}

}  // namespace

Identity make_identity(Identity own, const TrainingOptions& options) {
  own["--batch-size"] = absl::StrCat(options.batch_size);
  own["--seed"] = absl::StrCat(options.seed);
  own["--learning-rate-schedule"] = options.learning_rate_schedule;
  own["--epochs"] = absl::StrCat(options.epochs);
  own["--learning-rate"] = to_flag(options.learning_rate);
  own["--clip"] = to_flag(options.clip);
  own["--amp"] = absl::StrCat(options.amp);
  return own;
}

void check_identity(Identity identity, const Snapshot& snapshot, const std::filesystem::path& path) {
  identity.erase("--epochs");
  for (const auto& [flag, value] : identity) {
    if (snapshot.options.count(flag) == 0) refuse(path, "it does not store " + flag);
  }
  for (const auto& [flag, value] : identity) {
    const auto& was = snapshot.options.at(flag);
    if (was == value) continue;
    throw std::runtime_error(path.string() + " was made with " + flag + " " + was + ", not " + value +
                             "; give the same value, or train without --resume");
  }
}

std::optional<Snapshot> read_start(const TrainingOptions& options, const Identity& identity,
                                   const std::vector<std::string>& columns) {
  if (options.resume.empty()) {
    if (options.load.empty()) return std::nullopt;
    return read_snapshot(options.load);
  }
  auto snapshot = read_snapshot(options.resume);
  check_identity(identity, snapshot, options.resume);
  check_progress(snapshot, columns, options.resume);
  if (snapshot.epoch >= options.epochs) {
    throw std::runtime_error(absl::StrCat(options.resume.string(), " has ", snapshot.epoch,
                                          " epochs already, and --epochs is ", options.epochs,
                                          ": nothing is left to train; give more --epochs"));
  }
  return snapshot;
}

void restore_start(const TrainingOptions& options, const Snapshot& snapshot, torch::nn::Module& model) {
  restore_model(model, snapshot.model);
  if (options.resume.empty()) return;
  torch::optim::Adam optimizer(model.parameters());
  restore_optimizer(optimizer, model, snapshot.optimizer);
  restore_random(snapshot.random);
}

}  // namespace gpipe::examples
