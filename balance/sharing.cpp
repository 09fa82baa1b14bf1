#include "balance/sharing.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "balance/layer_trace.h"

namespace gpipe {

void find_sharing(Profile& profile, const std::vector<NamedLayer>& layers, bool can_lend) {
  absl::flat_hash_map<const void*, int> owners;             // the first layer of each tensor
  absl::flat_hash_map<const void*, TieProfile> parameters;  // that can be lent
  std::vector<const void*> order;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const int layer = static_cast<int>(i);
    auto& shares_with = profile.layers[i].shares_with = layer;
    const auto stay_together = [&](const at::Tensor& tensor) {
      shares_with = std::min(shares_with, owners.try_emplace(tensor.unsafeGetTensorImpl(), layer).first->second);
    };
    for (const auto& buffer : layers[i].module->buffers()) stay_together(buffer);
    for (const auto& item : layers[i].module->named_parameters()) {
      if (!can_lend) {
        stay_together(item.value());
        continue;
      }
      const void* key = item.value().unsafeGetTensorImpl();
      auto& tie = parameters[key];
      if (tie.layers.empty()) {
        order.push_back(key);
        tie = {layers[i].name + "." + item.key(), {}, bytes_of(item.value())};
      }
      if (tie.layers.empty() || tie.layers.back() != layer) tie.layers.push_back(layer);
    }
  }
  for (const void* key : order) {
    if (auto& tie = parameters.at(key); tie.layers.size() > 1) profile.ties.push_back(std::move(tie));
  }
}

}  // namespace gpipe
