#include "gpipe/assembly/inventory.h"

#include <torch/headeronly/version.h>

#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/checks.h"
#include "gpipe/ranks.h"
#include "gpipe/schedule/generators.h"
#include "gpipe/tensors/sample_hash.h"
#include "gpipe/version.h"

namespace gpipe {
namespace {

std::string describe_layer(const Layer& layer) {
  std::ostringstream text;
  text << "'" << layer.name() << "'";
  const auto add = [&](const auto& tensors, bool wants_gradients) {
    for (const auto& tensor : tensors) {
      text << ", " << tensor.key() << " " << tensor.value().scalar_type();
      tensor.value().is_nested() ? text << "[nested]" : text << tensor.value().sizes();
      if (wants_gradients && !tensor.value().requires_grad()) text << " frozen";
    }
  };
  add(layer.module()->named_parameters(), /*wants_gradients=*/true);
  add(layer.module()->named_buffers(), /*wants_gradients=*/false);
  return text.str();
}

}  // namespace

void TensorPlaces::add(int stage, const std::string& layer,
                       const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  if (!all_.empty() && all_.back().stage != stage) of_stage_ = 0;
  for (const auto& tensor : tensors) {
    TensorPlace place{stage, layer, tensor.key(), WeakTensor(tensor.value().getIntrusivePtr()), all_.size(), of_stage_};
    const auto [known, is_first] = latest_.try_emplace(tensor.value().unsafeGetTensorImpl(), all_.size());
    const auto latest = std::exchange(known->second, all_.size());
    if (!is_first) place.first = all_[latest].first;
    const bool is_first_of_stage = is_first || all_[latest].stage != stage;
    is_first_of_stage ? ++of_stage_ : place.number = all_[latest].number;
    all_.push_back(std::move(place));
  }
}

std::vector<TensorPlace> places_of_parameters(const std::vector<Stage>& stages) {
  TensorPlaces places;
  for (const auto& stage : stages) {
    for (const auto& layer : stage.layers) {
      places.add(stage.index, layer->name(), layer->module()->named_parameters());
    }
  }
  return places.take();
}

void Inventory::add(int stage, const Layer& layer) {
  const auto module = layer.module();
  const auto& name = layer.name();
  const auto [first, inserted] = names_.emplace(module, name);
  if (!inserted) {
    refuse_argument("layers '" + first->second + "' and '" + name +
                    "' are the same module; use a copy, because each layer belongs to one place");
  }
  for (auto& skip : skip_declarations({name, module}, static_cast<int>(descriptions_.size()))) {
    skips_.push_back(std::move(skip));
  }
  parameters_.add(stage, name, module->named_parameters());
  buffers_.add(stage, name, module->named_buffers());
  for (const auto& parameter : module->named_parameters()) {
    values_.emplace_back(descriptions_.size(), sample_hash({parameter.value()}));
  }
  descriptions_.push_back(describe_layer(layer));
}

std::vector<std::uint64_t> Inventory::values() const {
  std::vector<int> places(parameters().size());  // by the first one
  for (const auto& parameter : parameters()) ++places[parameter.first];
  std::vector<std::uint64_t> values(descriptions_.size(), 1);
  for (std::size_t p = 0; p < values_.size(); ++p) {
    if (places[parameters()[p].first] > 1) continue;
    const auto [layer, hash] = values_[p];
    values[layer] = hash == 0 ? 0 : values[layer] * (hash | 1);
  }
  return values;
}

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
