#include "examples/common/outputs.h"

#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_join.h"
#include "examples/common/files.h"
#include "examples/common/history.h"

namespace gpipe::examples {
namespace {

namespace fs = std::filesystem;

/// Whether the snapshot to resume is in the output directory.
bool goes_on(const TrainingOptions& options) {
  if (options.resume.empty()) return false;
  std::error_code error;
  return fs::equivalent(fs::absolute(options.resume).parent_path(), options.output, error);
}

std::vector<std::string> earlier_training(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto* name : {kLatestSnapshot, kBestSnapshot}) {
    if (fs::exists(directory / name, error)) names.emplace_back(name);
  }
  if (has_lines(directory / kHistoryFile)) names.emplace_back(kHistoryFile);
  return names;
}

}  // namespace

void check_outputs(const TrainingOptions& options) {
  const auto names = earlier_training(options.output);
  if (!names.empty() && !options.overwrite && !goes_on(options)) {
    std::string resume;
    if (names.front() != kHistoryFile) {
      resume = "--resume " + (options.output / names.front()).string() + " to go on with it, ";
    }
    throw std::runtime_error(options.output.string() + " holds an earlier training (" + absl::StrJoin(names, ", ") +
                             "); give " + resume + "--overwrite to replace it, or another --output");
  }
  check_writable_directory(options.output);
  if (!options.trace.empty()) check_writable_file(options.trace);
}

void remove_earlier_training(const TrainingOptions& options) {
  if (goes_on(options)) return;
  for (const auto* name : {kLatestSnapshot, kBestSnapshot, kHistoryFile}) {
    std::error_code error;
    fs::remove(options.output / name, error);
    if (error) throw std::runtime_error("cannot replace " + (options.output / name).string() + ": " + error.message());
  }
}

}  // namespace gpipe::examples
