#include "examples/common/outputs.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "absl/strings/str_join.h"
#include "examples/common/files.h"
#include "examples/common/history.h"
#include "examples/common/tensorboard.h"

namespace gpipe::examples {
namespace {

namespace fs = std::filesystem;

// Whether the snapshot to resume is in the output folder.
bool resumes_in_place(const TrainingOptions& options) {
  if (options.resume.empty()) return false;
  std::error_code error;
  return fs::equivalent(fs::absolute(options.resume).parent_path(), options.output, error);
}

std::vector<std::string> snapshots(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto* name : {kLatestSnapshot, kBestSnapshot}) {
    if (fs::exists(folder / name, error)) names.emplace_back(name);
  }
  return names;
}

std::vector<std::string> earlier_training(const TrainingOptions& options) {
  auto names = snapshots(options.output);
  const int lost = options.auto_resume ? 1 : 0;  // epochs that a killed run can leave without a snapshot
  if (count_lines(options.output / kHistoryFile) > lost) names.emplace_back(kHistoryFile);
  return names;
}

// Whether it is the picture of an epoch, such as epoch_001.png.
bool is_picture(std::string_view name) {
  constexpr std::string_view kSuffix = ".png";
  for (const std::string_view prefix : {"epoch_", "confusion_"}) {
    if (name.size() < prefix.size() + 3 + kSuffix.size() || !name.starts_with(prefix) || !name.ends_with(kSuffix)) {
      continue;
    }
    const auto number = name.substr(prefix.size(), name.size() - prefix.size() - kSuffix.size());
    return std::all_of(number.begin(), number.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  }
  return false;
}

bool is_output(const std::string& name) {
  return name == kLatestSnapshot || name == kBestSnapshot || name == kHistoryFile ||
         name == temporary_history(kHistoryFile) || is_event_file(name) || is_picture(name);
}

}  // namespace

// A run that is killed at the end of its first epoch can leave best.snapshot alone.
fs::path latest_snapshot(const fs::path& folder) {
  const auto names = snapshots(folder);
  return names.empty() ? fs::path() : folder / names.front();
}

void check_outputs(const TrainingOptions& options) {
  const auto names = earlier_training(options);
  if (!names.empty() && !options.overwrite && !resumes_in_place(options)) {
    std::string resume;
    if (names.front() != kHistoryFile) {
      resume = "--resume " + (options.output / names.front()).string() + " to continue it, ";
    }
    throw std::runtime_error(options.output.string() + " holds an earlier training (" + absl::StrJoin(names, ", ") +
                             "); give " + resume + "--overwrite to replace it, or another --output");
  }
  check_writable_directory(options.output);
  if (!options.trace.empty()) check_writable_file(options.trace);
}

void remove_earlier_training(const TrainingOptions& options) {
  if (!options.overwrite || resumes_in_place(options)) return;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(options.output)) {
    if (!entry.is_directory() && is_output(entry.path().filename().string())) files.push_back(entry.path());
  }
  for (const auto& file : files) {
    std::error_code error;
    fs::remove(file, error);
    if (error) throw std::runtime_error("cannot remove " + file.string() + ": " + error.message());
  }
}

}  // namespace gpipe::examples
