#include "gpipe/parcel_edges.h"

#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

// The same memory, whose end the counter learns of on any thread.
std::shared_ptr<const void> counted(std::shared_ptr<const void> owner, std::shared_ptr<ByteCounter> counter) {
  const auto* memory = owner.get();
  return {memory, [owner = std::move(owner), counter = std::move(counter)](const void*) mutable {
            const AllocationListener::Scope counting(counter);
            owner.reset();
          }};
}

}  // namespace

DeviceLink* ParcelEdges::link(const Action& action, int edge) const {
  const int from = pipeline_.worker_of(pipeline_.edges()[edge].from);
  const int to = pipeline_.worker_of(pipeline_.edges()[edge].to);
  return action.kind == Kind::F ? pipeline_.device_link(from, to) : pipeline_.device_link(to, from);
}

Outgoing ParcelEdges::take_off(const Action& action, const std::vector<int>& edges) {
  std::vector<Parcel> parcels;
  for (const int edge : edges) {
    if (action.kind == Kind::F) {
      parcels.push_back(transport_.receive(edge, action.micro_batch));
      continue;
    }
    auto& parcel = parcels.emplace_back();
    for (auto& gradient : transport_.receive_gradients(edge, action.micro_batch)) {
      parcel.add(std::move(gradient), /*gradient_wanted=*/false);
    }
  }
  const auto& peers = *pipeline_.peers();
  std::vector<at::Tensor> on_device;
  auto message = to_message(std::move(parcels), peers.rank(), peers.codec(), &on_device);
  if (auto* between = link(action, edges.front())) between->send(on_device);
  if (counter_) message.owner = counted(std::move(message.owner), counter_);
  return message;
}

void ParcelEdges::put_on(const Action& action, const std::vector<int>& edges, std::unique_ptr<Incoming> message) {
  auto parcels = to_parcels(std::move(message));
  if (parcels.size() != edges.size()) {
    throw std::runtime_error("[gpipe] a message for " + std::to_string(edges.size()) + " edges has " +
                             std::to_string(parcels.size()) + " parcels; run the same version of gpipe on all ranks");
  }
  StreamEvents ready;
  if (auto* between = link(action, edges.front())) ready = between->receive(parcels);
  for (std::size_t k = 0; k < edges.size(); ++k) {
    if (action.kind == Kind::F) {
      transport_.send(edges[k], action.micro_batch, std::move(parcels[k]), ready);
    } else {
      transport_.send_gradients(edges[k], action.micro_batch, std::move(parcels[k].tensors), ready);
    }
  }
}

// Transfers between devices also end when a rank has failed.
void ParcelEdges::settle(int from, int to) {
  auto* between = pipeline_.device_link(from, to);
  if (between == nullptr) return;
  const auto& peers = *pipeline_.peers();
  between->settle(peers.options().timeout());
  peers.check();
}

}  // namespace gpipe
