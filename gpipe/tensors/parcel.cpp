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

void Parcel::add_leaving(const at::Tensor& tensor) {
  add(tensor.defined() ? tensor.detach() : tensor, tensor.defined() && tensor.requires_grad());
}

void Parcel::add_leaving(const Value& value) {
  form = value.form();
  for (const auto& tensor : value.tensors()) add_leaving(tensor);
}

bool Parcel::changed() const { return std::ranges::any_of(versions, &VersionWatch::changed); }

void Parcel::renew_versions() { versions = std::vector<VersionWatch>(tensors.begin(), tensors.end()); }

}  // namespace gpipe
