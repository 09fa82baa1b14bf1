#include "gpipe/model_manifest.h"

#include <torch/headeronly/version.h>

#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gpipe/ranks/ranks.h"
#include "gpipe/schedule/generators.h"
#include "gpipe/version.h"

namespace gpipe {
namespace {

std::string describe(const Layer& layer) {
  std::ostringstream text;
  text << "'" << layer.name() << "'";
  const auto module = layer.module();
  const auto add = [&](const auto& tensors) {
    for (const auto& tensor : tensors) {
      text << ", " << tensor.key() << " ";
      if (tensor.value().defined()) {
        text << tensor.value().scalar_type() << tensor.value().sizes();
      } else {
        text << "undefined";
      }
    }
  };
  add(module->named_parameters());
  add(module->named_buffers());
  return text.str();
}

}  // namespace

Manifest manifest_of(const std::vector<Stage>& stages, const std::vector<Edge>& edges, const GPipeOptions& options) {
  Manifest manifest;
  const auto add = [&](const std::string& name, const auto& value) {
    manifest.emplace_back(name, absl::StrCat(value));
  };
  add("gpipe's version", version());
  add("torch's version", TORCH_VERSION);
  if (options.ranks()) add("the number of replicas", options.ranks()->replicas());
  std::vector<std::size_t> balance;
  for (const auto& stage : stages) balance.push_back(stage.layers.size());
  add("the balance", "{" + absl::StrJoin(balance, ", ") + "}");
  add("the schedule", options.schedule_function() ? "a function" : options.schedule());
  add("stages_per_worker", options.stages_per_worker());
  add("the placement", "{" + absl::StrJoin(options.placement(), ", ") + "}");
  add("chunks", options.chunks());
  add("split_size", options.split_size());
  add("the checkpoint mode", to_string(options.checkpoint()));
  add("deferred_batch_norm", options.deferred_batch_norm() ? "true" : "false");
  for (std::size_t e = 0; e < edges.size(); ++e) {
    add("edge " + std::to_string(e), absl::StrCat(edges[e].name, " from stage ", edges[e].from, " to ", edges[e].to));
  }
  for (const auto& stage : stages) {
    for (std::size_t i = 0; i < stage.layers.size(); ++i) {
      add("layer " + std::to_string(stage.first_layer + i), describe(*stage.layers[i]));
    }
  }
  return manifest;
}

}  // namespace gpipe
