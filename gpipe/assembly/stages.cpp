#include "gpipe/assembly/stages.h"

#include <torch/headeronly/version.h>

#include <algorithm>
#include <map>
#include <set>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/checks.h"
#include "gpipe/error_info.h"
#include "gpipe/ranks.h"
#include "gpipe/ranks/job.h"
#include "gpipe/schedules.h"
#include "gpipe/version.h"
#include "skip/layout.h"

namespace gpipe {
namespace {

// On an error, tells the other ranks.
std::unique_ptr<Layer> make_or_report(const LayerFactory& factory, Ranks* ranks) {
  try {
    return factory();
  } catch (...) {
    if (ranks != nullptr) {
      ranks->job().connections().fail(absl::StrCat("rank ", ranks->rank(), " cannot make layer '", factory.name(),
                                                   "': ", message_of(std::current_exception())));
    }
    throw;
  }
}

std::string describe_layer(const Layer& layer) {
  auto text = "'" + layer.name() + "'";
  const auto add = [&](const auto& tensors, bool wants_gradients) {
    for (const auto& tensor : tensors) {
      const auto& value = tensor.value();
      absl::StrAppend(&text, ", ", tensor.key(), " ", c10::str(value.scalar_type()),
                      value.is_nested() ? "[nested]" : c10::str(value.sizes()),
                      wants_gradients && !value.requires_grad() ? " frozen" : "");
    }
  };
  add(layer.module()->named_parameters(), /*wants_gradients=*/true);
  add(layer.module()->named_buffers(), /*wants_gradients=*/false);
  return text;
}

// What must be known of all layers of a model, also of other ranks' layers. Keeps no layer.
struct Inventory {
  std::map<std::weak_ptr<torch::nn::Module>, std::string, std::owner_less<>> names;
  TensorPlaces parameters;
  TensorPlaces buffers;
  std::vector<SkipDeclaration> skips;
  // Each layer's name, parameters and buffers with their types and shapes, and which parameters are frozen.
  std::vector<std::string> descriptions;

  // Adds the model's next layer. Errors: std::invalid_argument for a module that is a layer already.
  void add(int stage, const Layer& layer) {
    const auto module = layer.module();
    const auto& name = layer.name();
    const auto [first, inserted] = names.emplace(module, name);
    if (!inserted) {
      refuse_argument("layers '", first->second, "' and '", name,
                      "' are the same module; use a copy, because each layer belongs to one place");
    }
    const auto declared = skip_declarations({name, module}, static_cast<int>(descriptions.size()));
    skips.insert(skips.end(), declared.begin(), declared.end());
    parameters.add(stage, name, module->named_parameters());
    buffers.add(stage, name, module->named_buffers());
    descriptions.push_back(describe_layer(layer));
  }
};

// REQUIRES: the options have ranks.
Manifest manifest_of(const std::vector<std::int64_t>& balance, const Workers& workers, const std::vector<Edge>& edges,
                     const Inventory& inventory, const GPipeOptions& options) {
  Manifest manifest;
  const auto add = [&](const std::string& name, const auto& value) {
    manifest.emplace_back(name, absl::StrCat(value));
  };
  add("gpipe's version", version());
  add("torch's version", TORCH_VERSION);
  add("the number of replicas", options.ranks()->replicas());
  add("how tensors travel", workers.has_wires ? "from GPU to GPU" : "through the hosts");
  add("the balance", absl::StrCat("[", absl::StrJoin(balance, ", "), "]"));
  // Calls compare what functions and lists say.
  const bool is_listed = has_lists(options.schedule());
  add("the schedule", options.schedule_function() ? "a function" : is_listed ? "lists" : options.schedule());
  add("stages_per_worker", options.stages_per_worker());
  add("the placement", absl::StrCat("[", absl::StrJoin(workers.schedules.placement, ", "), "]"));
  add("chunks", options.chunks());
  add("split_size", options.split_size());
  add("the checkpoint mode", to_string(options.checkpoint()));
  add("deferred_batch_norm", options.deferred_batch_norm() ? "true" : "false");
  for (std::size_t e = 0; e < edges.size(); ++e) {
    add(absl::StrCat("edge ", e), absl::StrCat(edges[e].name, " from stage ", edges[e].from, " to ", edges[e].to));
  }
  for (std::size_t i = 0; i < inventory.descriptions.size(); ++i) {
    add("layer " + std::to_string(i), inventory.descriptions[i]);
  }
  return manifest;
}

std::vector<Stage> make_stages(const std::vector<std::int64_t>& balance, const Workers& workers,
                               LayerFactories factories, Ranks* ranks, Inventory& inventory) {
  std::vector<Stage> stages(balance.size());
  auto factory = factories.begin();
  for (std::size_t s = 0; s < stages.size(); ++s) {
    auto& stage = stages[s];
    const int worker = workers.schedules.placement[s];
    stage.index = static_cast<int>(s);
    stage.first_layer = static_cast<int>(factory - factories.begin());
    stage.device = workers.devices[worker];
    for (std::int64_t i = 0; i < balance[s]; ++i, ++factory) {
      auto layer = make_or_report(*factory, ranks);
      inventory.add(stage.index, *layer);
      if (workers.is_here(worker)) stage.layers.push_back(std::move(layer));
    }
  }
  return stages;
}

// Refuses a loan between two devices of this rank, unless run_layers use a stand-in.
void check_loans(const Assembly& model) {
  for (const auto& loan : model.loans) {
    if (!model.here[loan.owner] || !model.here[loan.borrower]) continue;
    const auto& owner = model.stages[loan.owner];
    const auto& borrower = model.stages[loan.borrower];
    if (borrower.run_layers || borrower.device == owner.device) continue;
    refuse_argument("stages ", loan.owner, " and ", loan.borrower, " share the parameter '", loan.name,
                    "', but are on ", owner.device.str(), " and ", borrower.device.str(),
                    "; put them on one device, or the layers that share it into one stage");
  }
}

// Refuses buffers that stages on two devices share.
void forbid_writes_to_shared_buffers(const std::vector<TensorPlace>& buffers, std::vector<Stage>& stages) {
  for (const auto& buffer : buffers) {
    const int stage = buffer.stage;
    const int other = buffers[buffer.first].stage;
    if (other == stage) continue;
    const auto what = "buffer '" + buffer.key.substr(buffer.key.rfind('.') + 1) + "'";
    if (stages[other].device != stages[stage].device) {
      refuse_argument("stages ", other, " and ", stage, " share ", what,
                      "; put the layers that share it into one stage");
    }
    const auto tensor = at::Tensor(buffer.tensor.lock());
    for (const int each : {other, stage}) {
      stages[each].state.forbid_writes(tensor, absl::StrCat(what, " of stages ", other, " and ", stage));
    }
  }
}

// Makes the edges between the stages. Sets each stage's skips and receivers, and the borrowed and lent parameters of
// this rank's stages, in the order of the edges.
void connect_stages(Assembly& model, const std::vector<std::int64_t>& balance, const std::vector<int>& placement,
                    const std::vector<SkipLink>& skips) {
  auto& stages = model.stages;
  auto& edges = model.edges;
  std::vector<LayerLink> links;
  for (const auto& skip : skips) links.push_back({skip.from, skip.readers, skip.key.name});
  std::vector<int> cut_links;
  edges = cut_edges(balance, links, placement, &cut_links);
  for (auto& stage : stages) {
    stage.receivers = {stage.index + 1};
    for (const auto& skip : skips) {
      const auto is_here = [&](int layer) {
        return layer >= stage.first_layer && layer < stage.first_layer + balance[stage.index];
      };
      const auto readers = std::ranges::count_if(skip.readers, is_here);
      if (readers > 0) stage.skip_readers[skip.key] = static_cast<int>(readers);
    }
  }
  const auto skip_edges = std::span(edges).last(cut_links.size());
  for (std::size_t i = 0; i < cut_links.size(); ++i) {
    std::set<int> reached{skip_edges[i].to};  // by this edge and those that continue it
    for (std::size_t k = i + 1; k < cut_links.size() && cut_links[k] == cut_links[i]; ++k) {
      if (reached.contains(skip_edges[k].from)) reached.insert(skip_edges[k].to);
    }
    const auto& key = skips[cut_links[i]].key;
    stages[skip_edges[i].from].skips_out.push_back(key);
    stages[skip_edges[i].from].receivers.push_back(*reached.rbegin());
    stages[skip_edges[i].to].skips_in.push_back(key);
  }
  for (const auto& loan : model.loans) {
    edges.push_back({loan.owner, loan.borrower, "parameter " + loan.name});
    if (model.here[loan.owner]) stages[loan.owner].lent.push_back(loan.name);
    stages[loan.owner].receivers.push_back(loan.borrower);
    if (model.here[loan.borrower]) stages[loan.borrower].borrowed.push_back(loan.borrowed);
  }
}

}  // namespace

void TensorPlaces::add(int stage, const std::string& layer,
                       const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    const auto first = firsts_.try_emplace(tensor.value().unsafeGetTensorImpl(), all_.size()).first->second;
    all_.push_back({stage, layer, tensor.key(), WeakTensor(tensor.value().getIntrusivePtr()), first});
  }
}

std::vector<TensorPlace> places_of_parameters(const std::vector<Stage>& stages) {
  TensorPlaces places;
  for (const auto& stage : stages) {
    for (const auto& layer : stage.layers) {
      places.add(stage.index, layer->name(), layer->module()->named_parameters());
    }
  }
  return places.all();
}

std::vector<Loan> find_loans(const std::vector<TensorPlace>& parameters) {
  std::vector<Loan> loans;
  for (const auto& parameter : parameters) {
    const auto& owner = parameters[parameter.first];
    if (owner.stage == parameter.stage) continue;
    const auto is_it = [&](const Loan& loan) { return loan.name == owner.name() && loan.borrower == parameter.stage; };
    if (std::ranges::any_of(loans, is_it)) continue;
    loans.push_back({owner.stage, parameter.stage, owner.name(), parameter.name()});
  }
  return loans;
}

Assembly assemble(const std::vector<std::int64_t>& balance, const Workers& workers, LayerFactories factories,
                  std::vector<RunLayers> run_layers, const GPipeOptions& options) {
  Assembly made;
  for (const int worker : workers.schedules.placement) made.here.push_back(workers.is_here(worker));
  Inventory inventory;
  made.stages = make_stages(balance, workers, std::move(factories), options.ranks().get(), inventory);
  for (std::size_t s = 0; s < run_layers.size(); ++s) {
    auto& stage = made.stages.at(s);
    if (made.here[s]) stage.run_layers = std::move(run_layers[s]);
  }
  made.parameters = inventory.parameters.all();
  made.buffers = inventory.buffers.all();
  made.loans = find_loans(made.parameters);
  check_loans(made);
  forbid_writes_to_shared_buffers(made.buffers, made.stages);
  connect_stages(made, balance, workers.schedules.placement, match_skips(inventory.skips));
  if (options.ranks()) {
    made.manifest = manifest_of(balance, workers, made.edges, inventory, options);
  }
  return made;
}

// From the last stage to the first, so that shared parameters end on the device of the first stage that has them.
void move_to_devices(const std::vector<Stage>& stages) {
  absl::flat_hash_map<const void*, const Stage*> first_with;
  for (const auto& stage : stages) {
    for (const auto& parameter : stage.parameters()) first_with.try_emplace(parameter.unsafeGetTensorImpl(), &stage);
  }
  for (auto stage = stages.rbegin(); stage != stages.rend(); ++stage) {
    const auto stays = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.device() == stage->device) return true;
      const auto found = first_with.find(tensor.unsafeGetTensorImpl());
      return found != first_with.end() && found->second != &*stage;
    };
    for (const auto& layer : stage->layers) {
      const auto module = layer->module();
      if (std::ranges::all_of(module->parameters(), stays) && std::ranges::all_of(module->buffers(), stays)) continue;
      module->to(stage->device);  // a nested pipeline refuses to move
    }
  }
}

}  // namespace gpipe
