#include "gpipe/ranks/transport.h"

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

// Returns the same memory. When it is freed, on any thread, the counter learns of it.
std::shared_ptr<const void> counted(std::shared_ptr<const void> owner, std::shared_ptr<ByteCounter> counter) {
  const auto* memory = owner.get();
  return {memory, [owner = std::move(owner), counter = std::move(counter)](const void*) mutable {
            const AllocationListener::Scope counting(counter);
            owner.reset();
          }};
}

}  // namespace

std::vector<int> edges_of_message(const Program& program, const Action& action, int worker) {
  std::vector<int> edges;
  for (const int edge : program.wiring().puts(action)) {
    const auto& ends = program.edges()[edge];
    if (program.layout().placement[action.kind == Kind::F ? ends.to : ends.from] == worker) edges.push_back(edge);
  }
  return edges;
}

void RemoteTransport::put(int edge, const Action& action, Item item) {
  const auto& placement = program_.layout().placement;
  const auto& ends = program_.edges()[edge];
  const int to = placement[action.kind == Kind::F ? ends.to : ends.from];
  item.parcel.wants_gradient.resize(item.parcel.tensors.size());  // a parcel of gradients has only its tensors
  item.parcel.alias_groups.resize(item.parcel.tensors.size());
  slots_.put(edge, action, std::move(item));
  const auto edges = edges_of_message(program_, action, to);
  if (edge != edges.back()) return;
  std::vector<Parcel> parcels;
  for (const int of_message : edges) parcels.push_back(slots_.take(of_message, action).parcel);
  std::vector<at::Tensor> on_device;
  auto message = to_message(parcels, team_.rank(), team_.codec(), &on_device);
  if (auto* link = link_(placement[action.stage], to)) link->send(on_device);
  if (counter_) message.owner = counted(std::move(message.owner), counter_);
  parcels.clear();
  team_.send(placement[action.stage], to, action, std::move(message));
}

Transport::Item RemoteTransport::take(int edge, const Action& action) {
  const auto& placement = program_.layout().placement;
  const auto& ends = program_.edges()[edge];
  const int from = placement[action.kind == Kind::F ? ends.from : ends.to];
  const int to = placement[action.stage];
  while (!slots_.has(edge, action)) {
    auto [sender, message] = team_.receive_next(from, to);
    const bool is_here =
        sender.stage < program_.layout().stages && sender.micro_batch < program_.layout().micro_batches;
    const auto edges = is_here ? edges_of_message(program_, sender, to) : std::vector<int>();
    auto parcels = to_parcels(std::move(message), team_.codec());
    if (edges.empty() || parcels.size() != edges.size()) {
      throw_error("a message for ", edges.size(), " edges has ", parcels.size(),
                  " parcels; run the same version of gpipe on all ranks");
    }
    StreamEvents ready;
    if (auto* link = link_(from, to)) ready = link->receive(parcels);
    for (std::size_t k = 0; k < parcels.size(); ++k) slots_.put(edges[k], sender, {std::move(parcels[k]), ready});
  }
  return slots_.take(edge, action);
}

}  // namespace gpipe
