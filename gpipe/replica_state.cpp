#include "gpipe/replica_state.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/ranks/peers.h"

namespace gpipe {

namespace {

// Gives the tensors the values that they have in the first replica. Undefined ones of `sent` stay as they are.
void take_values(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& sent, Peers& peers) {
  at::NoGradGuard no_grad;
  if (tensors.empty()) return;
  Parcel parcel;
  for (const auto& tensor : sent) {
    // Nobody can write to elements that lie in one place.
    const bool is_sent = tensor.defined() && at::has_internal_overlap(tensor) != at::MemOverlap::Yes;
    parcel.add(is_sent ? tensor.detach() : at::Tensor(), /*gradient_wanted=*/false);
  }
  parcel = peers.share(Peers::Result::kOfTwins, peers.twin(0), std::move(parcel));
  if (peers.replica() == 0) return;
  if (parcel.tensors.size() != tensors.size()) {
    throw std::runtime_error("[gpipe] the layers of this replica have " + std::to_string(tensors.size()) +
                             " parameters and buffers to make equal, but those of the first replica have " +
                             std::to_string(parcel.tensors.size()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& value = parcel.tensors[i];
    if (!value.defined()) continue;
    if (value.sizes() == tensors[i].sizes()) {
      tensors[i].variable_data().copy_(value);
    } else {
      tensors[i].set_data(value.to(tensors[i].device()));  // a buffer whose shape follows the data
    }
  }
}

}  // namespace

void take_state_of_first_replica(Pipeline& pipeline) {
  std::vector<at::Tensor> tensors;
  for (const auto& stage : pipeline.stages()) {
    for (const auto& list : {stage.parameters(), stage.buffers()}) {
      tensors.insert(tensors.end(), list.begin(), list.end());
    }
  }
  take_values(tensors, tensors, *pipeline.peers());
}

void take_buffers_of_first_replica(Pipeline& pipeline) {
  std::vector<at::Tensor> buffers;
  std::vector<at::Tensor> sent;
  for (const auto& stage : pipeline.stages()) {
    for (const auto& buffer : stage.buffers()) {
      buffers.push_back(buffer);
      sent.push_back(stage.state.may_change(buffer) ? buffer : at::Tensor());
    }
  }
  take_values(buffers, sent, *pipeline.peers());
}

void merge_over_replicas(std::vector<BatchStatistics>& statistics, Pipeline& pipeline) {
  auto& peers = *pipeline.peers();
  for (std::size_t s = 0; s < statistics.size(); ++s) {
    const auto buffers = pipeline.stages()[s].buffers();
    if (buffers.empty()) continue;
    Parcel parcel;
    for (auto& tensor : statistics[s].to_tensors(buffers)) parcel.add(std::move(tensor), /*gradient_wanted=*/false);
    std::vector<Gradients> of_replicas;
    for (auto& each : peers.exchange(std::move(parcel))) of_replicas.push_back(std::move(each.tensors));
    statistics[s].join(buffers, of_replicas);
  }
}

}  // namespace gpipe
