#include "examples/common/resume.h"

#include <iostream>
#include <stdexcept>

namespace gpipe::examples {
namespace {

namespace fs = std::filesystem;

bool has_snapshot(const fs::path& folder) { return fs::exists(folder / "snapshot.json"); }

// Whether the snapshot to resume is in the output folder.
bool resumes_in_place(const TrainingOptions& options) {
  std::error_code error;
  return !options.resume.empty() && fs::equivalent(fs::absolute(options.resume).parent_path(), options.output, error);
}

}  // namespace

void check_identity(const Identity& identity, const nlohmann::json& saved, const fs::path& path) {
  for (const auto& [flag, value] : identity) {
    const auto was = saved["options"].value(flag, "none");
    if (was == value || flag == "--epochs") continue;
    throw std::runtime_error(path.string() + " was made with " + flag + " " + was + ", not " + value +
                             "; give the same value, or train without --resume");
  }
}

nlohmann::json read_saved(const fs::path& path) {
  const auto saved = nlohmann::json::parse(read_progress(path).extra);
  if (saved.is_object() && saved.contains("options")) return saved;
  throw std::runtime_error(path.string() + " is not a snapshot of a training program");
}

std::optional<nlohmann::json> read_resumed(TrainingOptions& options, const Identity& identity) {
  if (options.resume == "auto") {
    options.resume.clear();
    // A run that is killed early can leave only the best one.
    for (const auto* name : {kBestSnapshot, kLatestSnapshot}) {
      if (has_snapshot(options.output / name)) options.resume = options.output / name;
    }
    if (options.ranks) options.resume = options.ranks->share(options.resume.string());  // all start alike
    const auto none = options.output.string() + " has no snapshot, so a new training begins";
    std::cout << "resume: " << (options.resume.empty() ? none : options.resume.string()) << std::endl;
  }
  if (options.resume.empty()) return std::nullopt;
  auto saved = read_saved(options.resume);
  check_identity(identity, saved, options.resume);
  return saved;
}

void prepare_output(const TrainingOptions& options) {
  const auto latest = options.output / kLatestSnapshot, best = options.output / kBestSnapshot;
  if (!resumes_in_place(options) && (has_snapshot(latest) || has_snapshot(best))) {
    throw std::runtime_error(options.output.string() + " holds an earlier training; give --resume " +
                             (has_snapshot(latest) ? latest : best).string() + " to continue it, or another --output");
  }
  std::error_code error;
  fs::create_directories(options.output, error);
  if (error) {
    throw std::runtime_error("cannot create the folder " + options.output.string() + ": " + error.message());
  }
}

}  // namespace gpipe::examples
