#include "gpipe/assembly/stages.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "gpipe/base/checks.h"
#include "gpipe/error_info.h"
#include "gpipe/ranks.h"
#include "gpipe/ranks/job.h"

namespace gpipe {
namespace {

[[noreturn]] void refuse_shared(int first, int second, const std::string& what) {
  refuse_argument("stages " + std::to_string(first) + " and " + std::to_string(second) + " share " + what +
                  "; put the layers that share it into one stage");
}

// On an error, tells the other ranks.
std::unique_ptr<Layer> make_or_report(const LayerFactory& factory, Ranks* ranks) {
  try {
    return factory();
  } catch (...) {
    if (ranks != nullptr) {
      ranks->job().board().report("rank " + std::to_string(ranks->rank()) + " cannot make layer '" + factory.name() +
                                  "': " + message_of(std::current_exception()));
    }
    throw;
  }
}

}  // namespace

std::vector<Stage> make_stages(const std::vector<std::int64_t>& balance, const std::vector<torch::Device>& devices) {
  std::vector<Stage> stages(balance.size());
  std::int64_t next = 0;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    stages[s].index = static_cast<int>(s);
    stages[s].first_layer = static_cast<int>(next);
    stages[s].device = devices[s];
    next += balance[s];
  }
  return stages;
}

Inventory fill_stages(std::vector<Stage>& stages, const std::vector<std::int64_t>& balance, LayerFactories factories,
                      const std::vector<bool>& here, Ranks* ranks) {
  Inventory inventory;
  auto factory = factories.begin();
  for (auto& stage : stages) {
    for (std::int64_t i = 0; i < balance[stage.index]; ++i, ++factory) {
      auto layer = make_or_report(*factory, ranks);
      inventory.add(stage.index, *layer);
      if (here[stage.index]) stage.layers.push_back(std::move(layer));
    }
  }
  return inventory;
}

std::vector<Loan> find_loans(const std::vector<TensorPlace>& parameters) {
  std::vector<Loan> loans;
  for (const auto& parameter : parameters) {
    const auto& owner = parameters[parameter.first];
    if (owner.stage == parameter.stage) continue;
    const Loan loan{owner.name(), owner.stage, parameter.stage, owner.number, parameter.number};
    if (std::find(loans.begin(), loans.end(), loan) == loans.end()) loans.push_back(loan);
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

void forbid_writes_to_shared_buffers(const std::vector<TensorPlace>& buffers, std::vector<Stage>& stages) {
  for (const auto& buffer : buffers) {
    const int stage = buffer.stage;
    const int other = buffers[buffer.first].stage;
    if (other == stage) continue;
    const auto what = "buffer '" + buffer.key.substr(buffer.key.rfind('.') + 1) + "'";
    if (stages[other].device != stages[stage].device) refuse_shared(other, stage, what);
    const auto tensor = at::Tensor(buffer.tensor.lock());
    for (const int each : {other, stage}) {
      stages[each].state.forbid_writes(tensor,
                                       what + " of stages " + std::to_string(other) + " and " + std::to_string(stage));
    }
  }
}

std::vector<Edge> connect_stages(std::vector<Stage>& stages, const std::vector<std::int64_t>& balance,
                                 const std::vector<SkipLink>& skips, const std::vector<Loan>& loans,
                                 const std::vector<bool>& here) {
  std::vector<LayerLink> links;
  for (const auto& skip : skips) links.push_back({skip.from, skip.to, skip.key.name});
  std::vector<int> cut_links;
  auto edges = cut_edges(balance, links, &cut_links);
  for (auto& stage : stages) stage.receivers = {stage.index + 1};
  for (std::size_t i = 0; i < cut_links.size(); ++i) {
    const auto& edge = edges[edges.size() - cut_links.size() + i];
    stages[edge.from].skips_out.push_back(skips[cut_links[i]].key);
    stages[edge.from].receivers.push_back(edge.to);
    stages[edge.to].skips_in.push_back(skips[cut_links[i]].key);
  }
  for (const auto& loan : loans) {
    edges.push_back({loan.owner, loan.borrower, "parameter " + loan.name});
    if (here[loan.owner]) stages[loan.owner].lent.push_back(loan.lent);
    stages[loan.owner].receivers.push_back(loan.borrower);
    if (here[loan.borrower]) stages[loan.borrower].borrowed.push_back(loan.borrowed);
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
