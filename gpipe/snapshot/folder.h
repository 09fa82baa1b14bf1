#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/base/json.h"
#include "gpipe/snapshot/safetensors.h"

namespace gpipe {

class GPipeImpl;

/// The file of a snapshot's folder that is written last. It describes the snapshot and has its own checksum.
///
/// - "files": of each file its "size", the "crc32" of its header, and the names of its "tensors"
/// - "model": what the model's state has besides tensors, by name
/// - "optimizer": its "type"; "param_groups", options and names of parameters; "state", by parameter; "rest"
/// - "random": of each rank, the states of its generators
/// - "step", "plan", "extra", "scheduler", "scaler"
///
/// A value is what Python saves or would save. What JSON lacks is an object with the kind under "$" and the content under
/// "of": a "tensor" (its name in a file), "tuple", "dict" (pairs) and others that python/gpipe/state.py lists.
inline constexpr char kManifest[] = "snapshot.json";

inline nlohmann::json tagged(const char* kind, nlohmann::json content) {
  return {{"$", kind}, {"of", std::move(content)}};
}

/// Returns the content of a tagged value of a kind, or nullptr for other values.
inline const nlohmann::json* content_of(const nlohmann::json& value, const char* kind) {
  return value.is_object() && value.value("$", nlohmann::json()) == kind && value.contains("of") ? &value["of"]
                                                                                                 : nullptr;
}

/// What one rank adds to a snapshot.
struct SnapshotPart {
  std::map<std::string, at::Tensor> weights;  ///< by their names in the unpartitioned model
  std::map<std::string, at::Tensor> state;    ///< other tensors of the manifest, whose names begin with a dot
  nlohmann::json manifest = nlohmann::json::object();
};

/// Saves what `make` returns on each rank of a pipeline, or in this process if `pipe` is null. Of replicas, saves the
/// first one's model and optimizer. Errors: as `make` and as save_snapshot().
void save_parts(const std::filesystem::path& folder, GPipeImpl* pipe, const std::function<SnapshotPart()>& make);

/// Writes the tensors of a part, one of `count`, to files that no other save overwrites. Returns its manifest with
/// these files. `save` differs for each save.
nlohmann::json write_files(const std::filesystem::path& folder, SnapshotPart part, int number, int count,
                           std::uint64_t save);

/// Removes the files of saves that neither the folder's manifest nor its index names.
void remove_leftovers(const std::filesystem::path& folder);

/// Makes the parts, in order, the folder's snapshot: writes the index and the manifest, then removes leftovers. Until
/// the manifest is renamed, the folder has the snapshot before.
void commit(const std::filesystem::path& folder, std::vector<nlohmann::json> parts);

/// A snapshot, of which tensors are read one by one. Errors:
/// std::system_error with the path for one that is not there; std::runtime_error for one that is damaged, not a
/// snapshot or of a newer version.
class SnapshotReader {
 public:
  explicit SnapshotReader(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  const nlohmann::json& manifest() const { return manifest_; }
  /// The names of the model's tensors.
  std::vector<std::string> weights() const;
  bool contains(const std::string& name) const { return places_.contains(name); }
  at::Tensor read(const std::string& name);
  /// Returns the type and shape of a tensor as description_of() does.
  std::string describe(const std::string& name);

 private:
  struct File {
    std::filesystem::path path;
    std::string checksum;
    std::unique_ptr<SafetensorsFile> opened = nullptr;
  };
  void open();
  /// Returns what a function returns of the file that has a tensor.
  template <class Read>
  auto from_file(const std::string& name, Read read);

  const std::filesystem::path path_;
  nlohmann::json manifest_;
  std::map<std::string, std::shared_ptr<File>> places_;  // of the tensors
};

/// Returns a manifest with its checksum.
nlohmann::json with_checksum(nlohmann::json manifest);

}  // namespace gpipe
