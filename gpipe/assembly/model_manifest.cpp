#include "gpipe/assembly/model_manifest.h"

#include <torch/headeronly/version.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gpipe/ranks.h"
#include "gpipe/schedule/generators.h"
#include "gpipe/version.h"

namespace gpipe {

Manifest manifest_of(const std::vector<std::int64_t>& balance, const std::vector<Edge>& edges,
                     const Inventory& inventory, const GPipeOptions& options) {
  Manifest manifest;
  const auto add = [&](const std::string& name, const auto& value) {
    manifest.emplace_back(name, absl::StrCat(value));
  };
  add("gpipe's version", version());
  add("torch's version", TORCH_VERSION);
  if (options.ranks()) {
    add("the number of replicas", options.ranks()->replicas());
    add("nccl", options.ranks()->options().nccl() ? "true" : "false");
  }
  add("the balance", "[" + absl::StrJoin(balance, ", ") + "]");
  add("the schedule", options.schedule_function() ? "a function" : options.schedule());
  add("stages_per_worker", options.stages_per_worker());
  add("the placement", "[" + absl::StrJoin(options.placement(), ", ") + "]");
  add("chunks", options.chunks());
  add("split_size", options.split_size());
  add("the checkpoint mode", to_string(options.checkpoint()));
  add("deferred_batch_norm", options.deferred_batch_norm() ? "true" : "false");
  for (std::size_t e = 0; e < edges.size(); ++e) {
    add("edge " + std::to_string(e), absl::StrCat(edges[e].name, " from stage ", edges[e].from, " to ", edges[e].to));
  }
  for (std::size_t i = 0; i < inventory.descriptions().size(); ++i) {
    add("layer " + std::to_string(i), inventory.descriptions()[i]);
  }
  const auto values = inventory.values();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool is_known = values[i] != 0 && (!options.ranks() || options.ranks()->replica() == 0);
    add("the initial values of layer " + std::to_string(i) + " (give all ranks the same seed)",
        is_known ? absl::StrCat("values with the hash ", values[i]) : "");
  }
  return manifest;
}

}  // namespace gpipe
