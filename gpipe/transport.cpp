#include "gpipe/transport.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace gpipe {

Transport::Transport(Pipeline& pipeline, std::vector<Parcel> inputs)
    : pipeline_(pipeline),
      inputs_(std::move(inputs)),
      parcels_(pipeline.edges().size() * inputs_.size()),
      gradients_(pipeline.edges().size() * inputs_.size()) {}

void Transport::admit_inputs() {
  for (const auto& tensor : inputs_.front().tensors) {
    inputs_ready_.push_back(record_event(tensor.device()));
    input_links_.push_back(new_link(tensor.device(), device(0)));
  }
}

Parcel Transport::receive_input(int micro_batch) {
  auto parcel = std::move(inputs_[micro_batch]);
  for (std::size_t k = 0; k < parcel.tensors.size(); ++k) {
    copy_to_device({&parcel.tensors[k], 1}, inputs_ready_[k], device(0), input_links_[k]);
  }
  parcel.renew_versions();
  return parcel;
}

void Transport::send(int edge, int micro_batch, Parcel parcel) {
  parcels_[slot(edge, micro_batch)] = {std::move(parcel), record_event(device(pipeline_.edges()[edge].from))};
}

Parcel Transport::receive(int edge, int micro_batch) {
  auto [parcel, ready] = std::exchange(parcels_[slot(edge, micro_batch)], {});
  const auto& [from, to, capacity, name] = pipeline_.edges()[edge];
  if (parcel.changed()) {
    throw std::runtime_error("[gpipe] " + name + " was changed in place on its way from stage " + std::to_string(from) +
                             " to stage " + std::to_string(to) + "; change a clone instead");
  }
  copy_to_device(parcel.tensors, ready, device(to), pipeline_.link(edge));
  parcel.renew_versions();
  return std::move(parcel);
}

void Transport::send_gradients(int edge, int micro_batch, Gradients gradients) {
  gradients_[slot(edge, micro_batch)] = {std::move(gradients), record_event(device(pipeline_.edges()[edge].to))};
}

Gradients Transport::receive_gradients(int edge, int micro_batch) {
  auto [gradients, ready] = std::exchange(gradients_[slot(edge, micro_batch)], {});
  copy_to_device(gradients, ready, device(pipeline_.edges()[edge].from), pipeline_.back_link(edge));
  return std::move(gradients);
}

}  // namespace gpipe
