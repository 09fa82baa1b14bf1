#include "gpipe/tensors/parcel.h"

#include <algorithm>
#include <utility>

namespace gpipe {

void Parcel::add(at::Tensor tensor, bool gradient_wanted, AliasGroup group) {
  versions.emplace_back(tensor);
  alias_groups.push_back(group);
  tensors.push_back(std::move(tensor));
  wants_gradient.push_back(gradient_wanted);
}

bool Parcel::changed() const {
  return std::any_of(versions.begin(), versions.end(), [](const auto& version) { return version.changed(); });
}

void Parcel::renew_versions() { versions = std::vector<VersionWatch>(tensors.begin(), tensors.end()); }

}  // namespace gpipe
