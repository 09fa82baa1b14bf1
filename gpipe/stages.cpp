#include "gpipe/stages.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "gpipe/checks.h"

namespace gpipe {
namespace {

[[noreturn]] void refuse_shared(int first, int second, const std::string& what) {
  refuse_argument("stages " + std::to_string(first) + " and " + std::to_string(second) + " share " + what +
                  "; put the layers that share it into one stage");
}

std::string name_of(const at::Tensor& parameter, const Stage& stage) {
  for (const auto& layer : stage.layers) {
    for (const auto& named : layer->module()->named_parameters()) {
      if (named.value().is_same(parameter)) return layer->name() + "." + named.key();
    }
  }
  return "";
}

}  // namespace

void check_distinct(const std::vector<std::unique_ptr<Layer>>& layers) {
  absl::flat_hash_map<const void*, std::string> seen;
  for (const auto& layer : layers) {
    const auto [first, inserted] = seen.emplace(layer->module().get(), layer->name());
    if (!inserted) {
      refuse_argument("layers '" + first->second + "' and '" + layer->name() +
                      "' are the same module; use a copy, because each layer belongs to one place");
    }
  }
}

std::vector<Stage> cut_into_stages(std::vector<std::unique_ptr<Layer>> layers, const std::vector<std::int64_t>& balance,
                                   const std::vector<torch::Device>& devices) {
  std::vector<Stage> stages;
  std::size_t next = 0;
  for (std::size_t s = 0; s < balance.size(); ++s) {
    auto& stage = stages.emplace_back();
    stage.index = static_cast<int>(s);
    stage.first_layer = static_cast<int>(next);
    stage.device = devices[s];
    for (std::int64_t i = 0; i < balance[s]; ++i) stage.layers.push_back(std::move(layers[next++]));
  }
  return stages;
}

std::vector<Loan> find_loans(const std::vector<Stage>& stages) {
  std::vector<Loan> loans;
  absl::flat_hash_map<const void*, std::pair<int, std::size_t>> owners;
  for (const auto& stage : stages) {
    const auto parameters = stage.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto [found, inserted] = owners.try_emplace(parameters[i].unsafeGetTensorImpl(), stage.index, i);
      if (inserted) continue;
      const auto [owner, lent] = found->second;
      loans.push_back({name_of(parameters[i], stages[owner]), owner, stage.index, lent, i});
    }
  }
  return loans;
}

void check_loans(const std::vector<Loan>& loans, const std::vector<Stage>& stages, const std::vector<bool>& here) {
  for (const auto& loan : loans) {
    if (!here[loan.owner] || !here[loan.borrower]) continue;
    const auto& owner = stages[loan.owner];
    const auto& borrower = stages[loan.borrower];
    if (borrower.run_layers || borrower.device == owner.device) continue;
    refuse_argument("stages " + std::to_string(loan.owner) + " and " + std::to_string(loan.borrower) +
                    " share the parameter '" + loan.name + "', but are on " + owner.device.str() + " and " +
                    borrower.device.str() + "; put them on one device, or the layers that share it into one stage");
  }
}

void drop_layers_elsewhere(std::vector<Stage>& stages, const std::vector<bool>& here) {
  for (auto& stage : stages) {
    if (here[stage.index]) continue;
    stage.layers.clear();
    stage.run_layers = nullptr;
    stage.borrowed.clear();
    stage.lent.clear();
  }
}

SharedBuffers find_shared_buffers(const std::vector<Stage>& stages) {
  SharedBuffers shared;
  absl::flat_hash_map<const void*, const Stage*> owner;
  for (const auto& stage : stages) {
    for (const auto& layer : stage.layers) {
      for (const auto& buffer : layer->module()->named_buffers()) {
        if (!buffer.value().defined()) continue;
        const auto [first, inserted] = owner.emplace(buffer.value().unsafeGetTensorImpl(), &stage);
        const auto& other = *first->second;
        if (inserted || &other == &stage) continue;
        const auto& key = buffer.key();
        const auto what = "buffer '" + key.substr(key.rfind('.') + 1) + "'";
        // Batch norm writes to these.
        if (what == "buffer 'running_mean'" || what == "buffer 'running_var'" || other.device != stage.device) {
          refuse_shared(other.index, stage.index, what);
        }
        shared.add(buffer.value(),
                   what + " of stages " + std::to_string(other.index) + " and " + std::to_string(stage.index));
      }
    }
  }
  return shared;
}

std::vector<Edge> connect_stages(std::vector<Stage>& stages, const std::vector<std::int64_t>& balance,
                                 const std::vector<SkipLink>& skips, const std::vector<Loan>& loans) {
  std::vector<LayerLink> links;
  for (const auto& skip : skips) links.push_back({skip.from, skip.to, skip.key.name});
  std::vector<int> crossing;
  auto edges = cut_edges(balance, links, &crossing);
  for (auto& stage : stages) stage.receivers = {stage.index + 1};
  for (std::size_t i = 0; i < crossing.size(); ++i) {
    const auto& edge = edges[edges.size() - crossing.size() + i];
    stages[edge.from].skips_out.push_back(skips[crossing[i]].key);
    stages[edge.from].receivers.push_back(edge.to);
    stages[edge.to].skips_in.push_back(skips[crossing[i]].key);
  }
  for (const auto& loan : loans) {
    edges.push_back({loan.owner, loan.borrower, 1, "parameter " + loan.name});
    stages[loan.owner].lent.push_back(loan.lent);
    stages[loan.owner].receivers.push_back(loan.borrower);
    stages[loan.borrower].borrowed.push_back(loan.borrowed);
  }
  return edges;
}

// From the last stage to the first, so that shared parameters end on the device of the first stage that has them.
void move_to_devices(const std::vector<Stage>& stages) {
  absl::flat_hash_map<const void*, const Stage*> first_with;
  for (const auto& stage : stages) {
    for (const auto& parameter : stage.parameters()) first_with.try_emplace(parameter.unsafeGetTensorImpl(), &stage);
  }
  for (auto stage = stages.rbegin(); stage != stages.rend(); ++stage) {
    const auto is_borrowed = [&](const at::Tensor& tensor) {
      const auto found = first_with.find(tensor.unsafeGetTensorImpl());
      return found != first_with.end() && found->second != &*stage;
    };
    for (const auto& layer : stage->layers) {
      const auto module = layer->module();
      auto tensors = module->parameters();
      for (const auto& buffer : module->buffers()) tensors.push_back(buffer);
      const bool there = std::all_of(tensors.begin(), tensors.end(), [&](const auto& tensor) {
        return !tensor.defined() || tensor.device() == stage->device || is_borrowed(tensor);
      });
      if (!there) module->to(stage->device);  // a nested pipeline refuses to move
    }
  }
}

}  // namespace gpipe
