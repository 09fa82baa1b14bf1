#include <chrono>
#include <optional>

#include "gpipe/error_info.h"
#include "gpipe/gpipe.h"
#include "gpipe/ranks.h"
#include "gpipe/snapshot/capture.h"

namespace gpipe {
namespace {

using nlohmann::json;

/// The state of this rank's layers. To save it: a tensor that ranks share is its owner's, under all of its names.
OwnState own_state_of(const GPipeImpl& pipe, bool to_save) {
  OwnState own = state_of(static_cast<const torch::nn::Module&>(pipe));
  const auto& ranks = pipe.options().ranks();
  if (!ranks) return own;
  own.rank = ranks->rank();
  own.ranks = ranks->size();
  for (const auto* names : {&pipe.parameter_names(), &pipe.buffer_names()}) {
    for (const auto& [name, stage, first] : *names) {
      const bool is_here = own.tensors.contains(name);
      const bool is_owned = own.tensors.contains(first);
      if (!is_here) own.elsewhere.insert(name);
      if (is_here && !is_owned && own.parameters.contains(name)) own.parameters.erase(name);
      if (is_here && !is_owned && to_save) own.tensors.erase(name);
      if (!is_here && is_owned && to_save) own.tensors.insert(name, at::Tensor(own.tensors[first]));
    }
  }
  return own;
}

}  // namespace

void save_parts(const std::filesystem::path& folder, GPipeImpl* pipe, const std::function<SnapshotPart()>& make) {
  const auto ranks = pipe == nullptr ? nullptr : pipe->options().ranks();
  const int rank = ranks ? ranks->rank() : 0;
  // An error of one rank is an error of all.
  const auto together = [&](auto call) {
    try {
      return call();
    } catch (...) {
      if (ranks) pipe->team().withdraw(message_of(std::current_exception()));
      throw;
    }
  };
  std::optional<FolderLock> lock;
  SnapshotPart part;
  auto save = together([&]() -> std::uint64_t {
    part = make();
    if (rank != 0) return 0;
    lock.emplace(folder);
    remove_leftovers(folder);  // of saves that failed, which may have filled the disk
    return std::chrono::system_clock::now().time_since_epoch().count();
  });
  if (ranks) save = pipe->team().largest(save);
  const auto mine = together([&] {
    const auto mesh = ranks ? ranks->mesh() : Mesh();
    if (mesh.replica_of(rank) != 0)
      part = {.weights = {}, .state = {}, .manifest = {{"random", part.manifest["random"]}}};
    return write_files(folder, std::move(part), rank / mesh.replicas, mesh.positions, save).dump();
  });
  const auto parts = ranks ? pipe->team().gather(mine, "the parts of a snapshot") : std::vector{mine};
  together([&] {
    std::vector<json> read;
    for (const auto& each : parts) read.push_back(parse_json(each));
    if (rank == 0) commit(folder, std::move(read));
  });
  if (ranks) pipe->team().largest(0);
}

void save_snapshot(const std::filesystem::path& folder, GPipeImpl& pipe, const torch::optim::Optimizer* optimizer,
                   const Progress& progress) {
  save_parts(folder, &pipe, [&] { return capture(own_state_of(pipe, /*to_save=*/true), optimizer, progress); });
}

void save_snapshot(const std::filesystem::path& folder, const torch::nn::Module& model,
                   const torch::optim::Optimizer* optimizer, const Progress& progress) {
  save_parts(folder, nullptr, [&] { return capture(state_of(model), optimizer, progress); });
}

Progress load_snapshot(const std::filesystem::path& folder, GPipeImpl& pipe, torch::optim::Optimizer* optimizer) {
  return restore(folder, own_state_of(pipe, /*to_save=*/false), optimizer);
}

}  // namespace gpipe
