#include "balance/sharing.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <utility>

#include "balance/layer_trace.h"
#include "gpipe/assembly/inventory.h"

namespace gpipe {

void find_sharing(Profile& profile, const std::vector<NamedLayer>& layers, bool can_lend) {
  TensorPlaces together;  // as if each layer were a stage
  TensorPlaces lent;
  for (int i = 0; i < static_cast<int>(layers.size()); ++i) {
    const auto& [name, module] = layers[i];
    together.add(i, name, module->named_buffers());
    (can_lend ? lent : together).add(i, name, module->named_parameters());
    profile.layers[i].shares_with = i;
  }
  for (const auto& place : together.all()) {
    auto& shares_with = profile.layers[place.stage].shares_with;
    shares_with = std::min(shares_with, together.all()[place.first].stage);
  }
  std::map<std::size_t, TieProfile> ties;  // by the first place
  for (const auto& place : lent.all()) {
    auto& tie = ties[place.first];
    if (tie.layers.empty()) tie = {place.name(), {}, bytes_of(at::Tensor(place.tensor.lock()))};
    if (tie.layers.empty() || tie.layers.back() != place.stage) tie.layers.push_back(place.stage);
  }
  for (auto& [first, tie] : ties) {
    if (tie.layers.size() > 1) profile.ties.push_back(std::move(tie));
  }
}

}  // namespace gpipe
