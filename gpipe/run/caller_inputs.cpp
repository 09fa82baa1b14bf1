#include "gpipe/run/caller_inputs.h"

#include <utility>

namespace gpipe {

CallerInputs::CallerInputs(Pipeline& pipeline, std::vector<Parcel> parcels, c10::Device device)
    : device_(device), parcels_(std::move(parcels)) {
  if (parcels_.empty()) return;
  for (const auto& tensor : parcels_.front().tensors) {
    ready_.push_back(record_events({}, tensor.device()));
    links_.push_back(pipeline.inlet_link(tensor.device(), device_));
  }
}

Parcel CallerInputs::receive(int micro_batch) {
  auto parcel = std::move(parcels_[micro_batch]);
  for (std::size_t k = 0; k < parcel.tensors.size(); ++k) {
    copy_to_device({&parcel.tensors[k], 1}, ready_[k], device_, links_[k]);
  }
  parcel.renew_versions();
  return parcel;
}

}  // namespace gpipe
