#include "examples/common/resume.h"

#include <iostream>
#include <regex>
#include <set>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "examples/common/files.h"
#include "examples/common/processes.h"

namespace gpipe::examples {
namespace {

namespace fs = std::filesystem;

// All processes must start alike, so the first one decides.
void find_snapshot(TrainingOptions& options) {
  options.resume.clear();
  for (const auto* name : {kBestSnapshot, kLatestSnapshot}) {  // a run that is killed early can leave only the best one
    if (fs::exists(options.output / name)) options.resume = options.output / name;
  }
  if (options.ranks) options.resume = options.ranks->share(options.resume.string());
  const auto none = options.output.string() + " has no snapshot, so a new training begins";
  std::cout << "resume: " << (options.resume.empty() ? none : options.resume.string()) << std::endl;
}

// Whether the snapshot to resume is in the output folder.
bool resumes_in_place(const TrainingOptions& options) {
  std::error_code error;
  return !options.resume.empty() && fs::equivalent(fs::absolute(options.resume).parent_path(), options.output, error);
}

bool is_output(const std::string& name) {
  static const std::set<std::string> kFiles = {kHistoryFile, kCurvesFile, kLatestSnapshot, kBestSnapshot};
  return kFiles.contains(name) || std::regex_match(name, std::regex("epoch_[0-9]+\\.png"));
}

}  // namespace

void check_identity(const Identity& identity, const Snapshot& snapshot, const fs::path& path) {
  for (const auto& [flag, value] : identity) {
    if (snapshot.options.contains(flag)) continue;
    throw std::runtime_error(path.string() + " is not a snapshot of this program: it does not store " + flag);
  }
  for (const auto& [flag, value] : identity) {
    const auto& was = snapshot.options.at(flag);
    if (was == value || flag == "--epochs") continue;
    throw std::runtime_error(path.string() + " was made with " + flag + " " + was + ", not " + value +
                             "; give the same value, or train without --resume");
  }
}

std::optional<Snapshot> read_resumed(TrainingOptions& options, const Identity& identity) {
  if (options.resume == kAuto) find_snapshot(options);
  if (options.resume.empty()) return std::nullopt;
  auto snapshot = read_snapshot(options.resume);
  check_identity(identity, snapshot, options.resume);
  return snapshot;
}

void prepare_output(const TrainingOptions& options) {
  std::vector<std::string> names;
  for (const auto* name : {kLatestSnapshot, kBestSnapshot}) {
    if (fs::exists(options.output / name)) names.emplace_back(name);
  }
  if (!names.empty() && !options.overwrite && !resumes_in_place(options)) {
    throw std::runtime_error(absl::StrCat(
        options.output.string(), " holds an earlier training (", absl::StrJoin(names, ", "), "); give --resume ",
        (options.output / names.front()).string(), " to continue it, --overwrite to replace it, or another --output"));
  }
  std::error_code error;
  fs::create_directories(options.output, error);
  if (error) {
    throw std::runtime_error("cannot create the folder " + options.output.string() + ": " + error.message());
  }
  if (!options.trace.empty()) write_file(options.trace, "");
}

void remove_earlier_training(const TrainingOptions& options) {
  if (!options.overwrite || resumes_in_place(options)) return;
  const std::vector<fs::directory_entry> entries(fs::directory_iterator(options.output), {});
  for (const auto& entry : entries) {
    if (is_output(entry.path().filename().string())) fs::remove(entry.path());
  }
}

}  // namespace gpipe::examples
