#include "gpipe/transport.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace gpipe {

Transport::Transport(const Pipeline& pipeline, int micro_batches)
    : pipeline_(pipeline),
      micro_batches_(micro_batches),
      parcels_(pipeline.edges().size() * micro_batches_),
      gradients_(pipeline.edges().size() * micro_batches_) {}

StreamEvents Transport::ready(int edge, c10::Device device, std::span<const at::Tensor> tensors) const {
  const auto& it = pipeline_.edges()[edge];
  const bool same_worker = pipeline_.worker_of(it.from) == pipeline_.worker_of(it.to);
  return same_worker ? StreamEvents() : record_events(tensors, device);
}

void Transport::send(int edge, int micro_batch, Parcel parcel) {
  auto events = ready(edge, pipeline_.ends(edge).from, parcel.tensors);
  send(edge, micro_batch, std::move(parcel), std::move(events));
}

void Transport::send(int edge, int micro_batch, Parcel parcel, StreamEvents ready) {
  parcels_[slot(edge, micro_batch)] = {std::move(parcel), std::move(ready)};
}

Parcel Transport::receive(int edge, int micro_batch) {
  auto [parcel, ready] = std::exchange(parcels_[slot(edge, micro_batch)], {});
  const auto& [from, to, capacity, name] = pipeline_.edges()[edge];
  if (parcel.changed()) {
    throw std::runtime_error("[gpipe] " + name + " was changed in place on its way from stage " + std::to_string(from) +
                             " to stage " + std::to_string(to) + "; change a clone instead");
  }
  copy_to_device(parcel.tensors, ready, pipeline_.ends(edge).to, pipeline_.link(edge));
  parcel.renew_versions();
  return std::move(parcel);
}

void Transport::send_gradients(int edge, int micro_batch, Gradients gradients) {
  auto events = ready(edge, pipeline_.ends(edge).to, gradients);
  send_gradients(edge, micro_batch, std::move(gradients), std::move(events));
}

void Transport::send_gradients(int edge, int micro_batch, Gradients gradients, StreamEvents ready) {
  gradients_[slot(edge, micro_batch)] = {std::move(gradients), std::move(ready)};
}

Gradients Transport::receive_gradients(int edge, int micro_batch) {
  auto [gradients, ready] = std::exchange(gradients_[slot(edge, micro_batch)], {});
  copy_to_device(gradients, ready, pipeline_.ends(edge).from, pipeline_.back_link(edge));
  return std::move(gradients);
}

}  // namespace gpipe
