#include "examples/common/start.h"

#include <torch/optim/adam.h>

#include <ostream>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/flags.h"
#include "examples/common/outputs.h"
#include "examples/common/processes.h"

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

// All processes must start alike, so the first one decides.
void find_snapshot(TrainingOptions& options, std::ostream& out) {
  options.auto_resume = true;
  options.resume = is_first(options.ranks) ? latest_snapshot(options.output) : "";
  if (options.ranks) options.resume = options.ranks->share(options.resume.string());
  if (options.resume.empty()) {
    out << "resume: " << options.output.string() << " has no snapshot, so a new training begins" << std::endl;
  } else {
    out << "resume: " << options.resume.string() << std::endl;
  }
}

// A damaged snapshot is not skipped, because the training could go back by many epochs unnoticed.
Snapshot read_resumed(const TrainingOptions& options) {
  try {
    return read_snapshot(options.resume);
  } catch (const std::runtime_error& error) {
    if (!options.auto_resume || !std::filesystem::exists(options.resume)) throw;
    throw std::runtime_error(absl::StrCat(
        error.what(), "; --resume auto does not skip it: move it away to continue from another one or to begin again"));
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

std::optional<Snapshot> read_start(TrainingOptions& options, const Identity& identity,
                                   const std::vector<std::string>& columns, std::ostream& out) {
  if (options.resume == kAuto) find_snapshot(options, out);
  if (options.resume.empty()) {
    if (options.load.empty()) return std::nullopt;
    return read_snapshot(options.load);
  }
  auto snapshot = read_resumed(options);
  check_identity(identity, snapshot, options.resume);
  check_progress(snapshot, columns, options.resume);
  if (snapshot.epoch >= options.epochs && !options.auto_resume) {
    throw std::runtime_error(absl::StrCat(options.resume.string(), " has ", snapshot.epoch,
                                          " epochs already, and --epochs is ", options.epochs,
                                          ": nothing is left to train; give more --epochs"));
  }
  return snapshot;
}

bool is_finished(const TrainingOptions& options, const std::optional<Snapshot>& start, std::ostream& out) {
  if (options.resume.empty() || start->epoch < options.epochs) return false;
  out << "nothing is left to train: " << options.resume.string() << " has " << start->epoch
      << " epochs, and --epochs is " << options.epochs << std::endl;
  return true;
}

void restore_start(const TrainingOptions& options, const Snapshot& snapshot, torch::nn::Module& model) {
  restore_model(model, snapshot.model);
  if (options.resume.empty()) return;
  torch::optim::Adam optimizer(model.parameters());
  restore_optimizer(optimizer, model, snapshot.optimizer);
  restore_random(snapshot.random);
}

}  // namespace gpipe::examples
