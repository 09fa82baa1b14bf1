#include "gpipe/rank_state.h"

#include <algorithm>
#include <exception>
#include <map>
#include <sstream>

#include "gpipe/base/checks.h"
#include "gpipe/ranks.h"

namespace gpipe {
namespace {

/// A name in the state of the whole model: its place, and the first name of the same tensor.
struct Place {
  std::size_t number;
  std::string first;
};

using Places = std::map<std::string, Place>;

Places places_of(const StateNames& names) {
  Places places;
  for (const auto& [name, first] : names.whole) places.emplace(name, Place{places.size(), first});
  return places;
}

StateNames names_of(const GPipeImpl& pipe) {
  StateNames names;
  for (const auto* each : {&pipe.parameter_names(), &pipe.buffer_names()}) {
    for (const auto& [name, stage, first] : *each) names.whole.emplace_back(name, first);
  }
  for (const auto& parameter : pipe.named_parameters()) names.own.insert(parameter.key());
  for (const auto& buffer : pipe.named_buffers()) names.own.insert(buffer.key());
  return names;
}

// The model and the optimizer, which differ from rank to rank.
Snapshot own_state(const StateNames& names, const Snapshot& mine) {
  const auto& own = names.own;
  const auto places = places_of(names);
  for (const auto& name : own) {
    if (!mine.model.contains(name)) refuse_argument("the snapshot lacks '", name, "' of this rank's layers");
  }
  const auto check = [&](const std::string& name) {
    if (own.count(name) == 0) refuse_argument("the snapshot has '", name, "', which is not of this rank's layers");
  };
  const auto check_trained = [&](const std::string& name) {
    check(name);
    const auto place = places.find(name);
    if (place == places.end() || own.count(place->second.first) != 0) return;
    refuse_argument("the optimizer has '", name, "', which another rank trains as '", place->second.first,
                    "'; make the optimizer of the pipeline's parameters()");
  };
  for (const auto& tensor : mine.model) check(tensor.key());
  for (const auto& group : mine.optimizer.param_groups) std::ranges::for_each(group.params, check_trained);
  for (const auto& [name, state] : mine.optimizer.state) check_trained(name);
  Snapshot state;
  state.model = mine.model;
  state.optimizer = mine.optimizer;
  return state;
}

// What all ranks' optimizers must have in common, with all digits.
std::string describe(const OptimizerState& optimizer) {
  std::ostringstream text;
  text.precision(17);
  text << "the state of the optimizer '" << optimizer.type << "' with groups";
  for (const auto& group : optimizer.param_groups) {
    text << " {";
    for (const auto& [name, value] : group.options) text << " " << name << "=" << value;
    text << " }";
  }
  return text.str();
}

// Returns `mine` with the joined states.
Snapshot join(const StateNames& of_state, const Snapshot& mine, std::vector<Snapshot> states) {
  const auto places = places_of(of_state);
  const auto place_of = [&](const std::string& name) {
    const auto found = places.find(name);
    return found == places.end() ? places.size() : found->second.number;  // one that was added to a layer later
  };
  const auto comes_before = [&](const std::string& a, const std::string& b) { return place_of(a) < place_of(b); };
  std::vector<std::string> names;
  std::map<std::string, std::pair<std::size_t, at::Tensor>> tensors;  // with the index of their state
  for (std::size_t r = 0; r < states.size(); ++r) {
    for (const auto& tensor : states[r].model) {
      names.push_back(tensor.key());
      tensors.emplace(tensor.key(), std::pair(r, tensor.value()));
    }
  }
  std::ranges::stable_sort(names, comes_before);
  auto whole = mine;
  whole.model.clear();
  for (const auto& name : names) {
    const auto place = places.find(name);
    const auto owner = tensors.find(place == places.end() ? name : place->second.first);
    const auto& [state, own] = tensors.at(name);
    const bool is_borrowed = owner != tensors.end() && owner->second.first != state;
    whole.model.insert(name, is_borrowed ? owner->second.second.clone() : own);
  }
  whole.optimizer = std::move(states.front().optimizer);
  for (std::size_t r = 1; r < states.size(); ++r) {
    auto& optimizer = states[r].optimizer;
    for (std::size_t g = 0; g < optimizer.param_groups.size(); ++g) {
      const auto& params = optimizer.param_groups[g].params;
      auto& joined = whole.optimizer.param_groups.at(g).params;
      joined.insert(joined.end(), params.begin(), params.end());
    }
    whole.optimizer.state.merge(optimizer.state);
  }
  for (auto& group : whole.optimizer.param_groups) std::ranges::stable_sort(group.params, comes_before);
  return whole;
}

}  // namespace

Snapshot gather(GPipeImpl& pipe, const StateNames& names, const Snapshot& mine) {
  if (!pipe.options().ranks()) return mine;
  const auto& mesh = pipe.options().ranks()->mesh();
  const int rank = pipe.options().ranks()->rank();
  std::vector<Snapshot> states;
  std::string bytes;  // rank 0 keeps its own state
  try {
    states.push_back(own_state(names, mine));
    if (rank != 0 && mesh.replica_of(rank) == 0) bytes = to_bytes(states.front());
  } catch (...) {
    pipe.team().withdraw(message_of(std::current_exception()));
    throw;
  }
  auto parts = pipe.team().gather(std::move(bytes), describe(mine.optimizer));
  if (rank != 0) return {};
  for (int p = 1; p < mesh.positions; ++p) {
    states.push_back(from_bytes(std::exchange(parts[mesh.rank_at(p, /*replica=*/0)], {})));
  }
  return join(names, mine, std::move(states));
}

Snapshot own_part(const StateNames& names, const Snapshot& whole) {
  const auto places = places_of(names);
  const auto is_elsewhere = [&](const std::string& name) {
    return places.count(name) != 0 && names.own.count(name) == 0;
  };
  auto part = whole;
  part.model.clear();
  for (const auto& tensor : whole.model) {
    if (!is_elsewhere(tensor.key())) part.model.insert(tensor.key(), tensor.value());
  }
  for (auto& group : part.optimizer.param_groups) std::erase_if(group.params, is_elsewhere);
  std::erase_if(part.optimizer.state, [&](const auto& entry) { return is_elsewhere(entry.first); });
  return part;
}

Snapshot gather(GPipeImpl& pipe, const Snapshot& mine) { return gather(pipe, names_of(pipe), mine); }

Snapshot own_part(const GPipeImpl& pipe, const Snapshot& whole) { return own_part(names_of(pipe), whole); }

}  // namespace gpipe
