#include "gpipe/snapshot/folder.h"

#include <zlib.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <sstream>
#include <system_error>

#include "absl/strings/str_format.h"
#include "gpipe/base/checks.h"
#include "gpipe/snapshot/capture.h"

namespace gpipe {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr char kIndex[] = "model.safetensors.index.json";
constexpr int kVersion = 1;

void write_text(const fs::path& path, const std::string& text) {
  replace_file(path, [&](const ByteSink& sink) { sink(text.data(), text.size()); });
}

std::string without_parameters(const json& optimizer) {
  std::string text = optimizer["type"].dump();
  for (auto group : optimizer["param_groups"]) {
    group.erase("params");
    text += " " + group.dump();
  }
  return text;
}

/// Returns the content of a file, empty if it cannot be read.
std::string read_text(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return std::move(text).str();
}

/// Adds the optimizer of a rank to what earlier ranks have saved of theirs.
void join_optimizer(json& all, const json& part, std::size_t rank) {
  if (all.is_null()) {
    all = part;
    return;
  }
  const auto before = without_parameters(all), other = without_parameters(part);
  if (before != other) {
    throw_error("the optimizer of rank ", rank, " has the class and options ", other, ", but that of earlier ranks ",
                before, ": all ranks need the same");
  }
  for (std::size_t g = 0; g < part["param_groups"].size(); ++g) {
    for (const auto& name : part["param_groups"][g]["params"]) all["param_groups"][g]["params"].push_back(name);
  }
  all["state"].update(part["state"]);
}

bool trains(const json& part) {
  const auto groups = part.contains("optimizer") ? part["optimizer"]["param_groups"] : json::array();
  return std::ranges::any_of(groups, [](const json& group) { return !group["params"].empty(); });
}

/// Writes Hugging Face's index of the model's tensors.
void write_index(const fs::path& folder, const json& files) {
  auto names = json::object();
  std::uint64_t size = 0;
  for (const auto& [file, description] : files.items()) {
    if (!file.starts_with("model-")) continue;
    for (const auto& name : description["tensors"]) names[name.get<std::string>()] = file;
    size += description["size"].get<std::uint64_t>();
  }
  const json index = {{"metadata", {{"total_size", size}}}, {"weight_map", std::move(names)}};
  write_text(folder / kIndex, index.dump(1));
}

}  // namespace

json with_checksum(json manifest) {
  manifest["crc32"] = "";
  const auto text = manifest.dump();
  manifest["crc32"] = absl::StrFormat("%08x", crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size()));
  return manifest;
}

json write_files(const fs::path& folder, SnapshotPart part, int number, int count, std::uint64_t save) {
  auto& files = part.manifest["files"] = json::object();
  for (auto* tensors : {&part.weights, &part.state}) {
    if (tensors->empty()) continue;
    auto names = json::array();
    for (const auto& [name, tensor] : *tensors) {
      if (tensors == &part.weights && name.starts_with('.')) {
        throw_error("the model's tensor '", name, "' begins with a dot, unlike the names of a state; rename it");
      }
      names.push_back(name);
    }
    const auto* kind = tensors == &part.weights ? "model" : "state";
    const auto file = absl::StrFormat("%s-%05d-of-%05d-%016x.safetensors", kind, number + 1, count, save);
    const auto checksum = write_safetensors(folder / file, {.tensors = std::move(*tensors), .model = ""});
    files[file] = {{"crc32", checksum}, {"size", fs::file_size(folder / file)}, {"tensors", std::move(names)}};
  }
  return std::move(part.manifest);
}

void commit(const fs::path& folder, std::vector<json> parts) {
  auto& all = parts.front();
  all["random"] = json::array({std::move(all["random"])});
  for (std::size_t rank = 1; rank < parts.size(); ++rank) {
    auto& part = parts[rank];
    for (const auto* key : {"files", "model"}) {
      if (part.contains(key)) all[key].update(part[key]);
    }
    all["random"].push_back(std::move(part["random"]));
    // A GradScaler on a rank that trains no parameter is never updated.
    if (part.contains("scaler") && trains(part) && !trains(all)) all["scaler"] = part["scaler"];
    if (part.contains("optimizer")) join_optimizer(all["optimizer"], part["optimizer"], rank);
  }
  all["version"] = kVersion;
  write_index(folder, all["files"]);
  write_text(folder / kManifest, with_checksum(all).dump());
  remove_leftovers(folder);
}

void remove_leftovers(const fs::path& folder) {
  static const std::regex written("(model|state)-\\d{5}-of-\\d{5}-[0-9a-f]{16}\\.safetensors(\\.tmp)?");
  const auto named = read_text(folder / kManifest) + read_text(folder / kIndex);
  const std::vector<fs::directory_entry> entries(fs::directory_iterator(folder), {});
  for (const auto& entry : entries) {
    const auto name = entry.path().filename().string();
    std::error_code ignored;
    if (std::regex_match(name, written) && named.find(name) == named.npos) fs::remove(entry.path(), ignored);
  }
}

SnapshotReader::SnapshotReader(fs::path path) : path_(std::move(path)) {
  try {
    open();
  } catch (const std::runtime_error&) {  // also std::system_error
    throw;
  } catch (const std::exception& error) {
    throw_error("not a snapshot: ", error.what());
  }
}

void SnapshotReader::open() {
  errno = 0;
  if (!std::ifstream(path_ / kManifest)) throw std::system_error(errno, std::generic_category());
  manifest_ = json_or_null(read_text(path_ / kManifest));
  if (!manifest_.is_object()) {
    throw_error("its ", kManifest, " is not a JSON object of at most ", kMostJsonLevels, " levels");
  }
  if (manifest_.value("version", 0) > kVersion) {
    throw_error("it has version ", manifest_["version"].dump(), ", but this program reads versions up to ", kVersion,
                ": use a newer version of the program");
  }
  if (with_checksum(manifest_) != manifest_) throw_error("its ", kManifest, " is damaged: its checksum does not match");
  for (const auto& [name, description] : manifest_["files"].items()) {
    auto file = std::make_shared<File>(File{path_ / name, description["crc32"].get<std::string>()});
    std::error_code error;
    if (fs::file_size(file->path, error) != description["size"] || error) {
      throw_error("its ", name, " is missing or truncated");
    }
    for (const auto& tensor : description["tensors"]) places_.emplace(tensor.get<std::string>(), file);
  }
}

std::vector<std::string> SnapshotReader::weights() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : places_) {
    if (!name.starts_with('.')) names.push_back(name);
  }
  return names;
}

template <class Read>
auto SnapshotReader::from_file(const std::string& name, Read read) {
  auto& file = *places_.at(name);
  try {
    if (!file.opened) {
      file.opened = std::make_unique<SafetensorsFile>(file.path);
      if (file.opened->text("header_crc32") != file.checksum) {
        throw_error("the file is damaged: the checksum of its header does not match");
      }
    }
    return read(*file.opened);
  } catch (const std::runtime_error& error) {
    throw_error(file.path.filename().string(), ": ", reason_of(error.what()));
  }
}

at::Tensor SnapshotReader::read(const std::string& name) {
  return from_file(name, [&](auto& file) { return file.read(name); });
}

std::string SnapshotReader::describe(const std::string& name) {
  return from_file(name, [&](auto& file) { return description_of(file.without_data(name)); });
}

}  // namespace gpipe
