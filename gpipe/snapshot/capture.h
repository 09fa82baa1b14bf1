#pragma once

#include <functional>
#include <set>
#include <string>

#include "gpipe/snapshot.h"
#include "gpipe/snapshot/folder.h"

namespace gpipe {

using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

/// The state of a model, as far as it is on this rank, whose number is `rank`.
struct OwnState {
  NamedTensors tensors;             ///< to save or to load
  NamedTensors parameters;          ///< that an optimizer can have
  std::set<std::string> elsewhere;  ///< names of other ranks' tensors
  int rank = 0;
  int ranks = 1;
};

/// All of a model.
OwnState state_of(const torch::nn::Module& model);

/// Describes a tensor's type, shape and layout, unless strided. Tensors of equal kinds can be copied into each other.
std::string description_of(const at::Tensor& tensor);

/// Adds an optimizer to a part. Errors: as save_snapshot().
void capture_optimizer(SnapshotPart& part, const torch::optim::Optimizer& optimizer, const NamedTensors& parameters);

/// Returns what sets the state of an optimizer, after it has checked and read all of it. Errors: as load_snapshot().
std::function<void()> optimizer_of(SnapshotReader& reader, const OwnState& own, torch::optim::Optimizer& optimizer);

/// The state of the default CPU generator, the source of all seeds. Errors: std::invalid_argument for a tensor that is
/// not such a state. The generator is then unchanged.
at::Tensor capture_random();
void restore_random(const at::Tensor& saved);

/// Returns what a rank saves. Errors: as save_snapshot().
SnapshotPart capture(const OwnState& own, const torch::optim::Optimizer* optimizer, const Progress& progress);

/// Loads it. Errors: as load_snapshot().
Progress restore(const std::filesystem::path& folder, const OwnState& own, torch::optim::Optimizer* optimizer);

}  // namespace gpipe
