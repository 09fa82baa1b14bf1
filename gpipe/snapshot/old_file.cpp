// Reads snapshots that are one file, of version 2. The only code that knows them.
#include <ATen/ops/empty.h>

#include "absl/strings/escaping.h"
#include "gpipe/base/checks.h"
#include "gpipe/snapshot/folder.h"

namespace gpipe {
namespace {

using nlohmann::json;

constexpr std::string_view kOptimizer = ".optimizer.";  // and the field's name, a dot and the parameter's name
constexpr std::string_view kHistory = ".history.";

/// A tuple was an array.
void restore_tuples(json& group) {
  for (auto& [name, value] : group.items()) {
    if (value.is_array() && name != "params") value = tagged("tuple", std::move(value));
  }
}

/// The options could have a scheduler's state, where a dict with other keys than texts was {"": pairs}.
json of_scheduler(const json& value) {
  if (value.is_object() && value.size() == 1 && value.contains("")) return tagged("counter", value[""]);
  if (!value.is_structured()) return value;
  auto restored = value;
  for (auto& each : restored) each = of_scheduler(each);
  return restored;
}

}  // namespace

json manifest_of_old(SafetensorsFile& file) {
  if (file.text("training").empty())
    throw_error("not a snapshot: the file has only weights, which read_weights() reads");
  const auto training = json_or_null(file.text("training"));
  if (!training.is_object() || training.value("version", 0) != 2) {
    throw_error("not a snapshot: its 'training' is not a JSON object of version 2 and of at most ", kMostJsonLevels,
                " levels");
  }
  json manifest = {{"version", 2}, {"optimizer", training.at("optimizer")}};
  auto& optimizer = manifest["optimizer"];
  for (auto& group : optimizer.at("param_groups")) restore_tuples(group);
  auto& extra = manifest["extra"] = json{{"history", json::object()}};
  for (const auto* key : {"epoch", "position", "options"}) extra[key] = training.at(key);
  for (const auto& name : file.names()) {
    if (name == ".random") {
      const auto state = file.read(name);
      const absl::string_view bytes(static_cast<const char*>(state.const_data_ptr()), state.nbytes());
      manifest["random"] = {{{"torch", absl::Base64Escape(bytes)}}};
    } else if (name.starts_with(kHistory)) {
      const auto values = file.read(name);
      const auto* begin = values.const_data_ptr<double>();
      extra["history"][name.substr(kHistory.size())] = std::vector<double>(begin, begin + values.numel());
    } else if (name.starts_with(kOptimizer) && name.find('.', kOptimizer.size()) != name.npos) {
      const auto dot = name.find('.', kOptimizer.size());
      optimizer["state"][name.substr(dot + 1)][name.substr(kOptimizer.size(), dot - kOptimizer.size())] =
          tagged("tensor", name);
    }
  }
  if (optimizer.value("type", "").empty()) manifest.erase("optimizer");
  const auto& options = extra["options"];
  if (options.contains("plan")) manifest["plan"] = json_or_null(options["plan"]);
  if (options.contains("scheduler")) manifest["scheduler"] = of_scheduler(json_or_null(options["scheduler"]));
  return manifest;
}

}  // namespace gpipe
