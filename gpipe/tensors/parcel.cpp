#include "gpipe/tensors/parcel.h"

#include <utility>

namespace gpipe {

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? static_cast<std::uint32_t>(tensor._version()) : 0;
}

VersionWatch::VersionWatch(const at::Tensor& tensor) : before_(version_of(tensor)) {
  if (tensor.defined() && !tensor.is_inference()) counter_ = tensor.unsafeGetTensorImpl()->version_counter();
}

void Parcel::add(at::Tensor tensor, bool gradient_wanted, Memory memory) {
  versions.push_back(version_of(tensor));
  this->memory.push_back(memory);
  tensors.push_back(std::move(tensor));
  wants_gradient.push_back(gradient_wanted);
}

bool Parcel::changed() const {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (version_of(tensors[i]) != versions[i]) return true;
  }
  return false;
}

void Parcel::renew_versions() {
  for (std::size_t i = 0; i < tensors.size(); ++i) versions[i] = version_of(tensors[i]);
}

}  // namespace gpipe
