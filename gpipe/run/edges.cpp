#include "gpipe/run/edges.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace gpipe {
namespace {

// The elements as integers of their size, which are equal if all bits are.
at::Tensor as_bits(const at::Tensor& tensor) {
  const auto numbers = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  switch (numbers.element_size()) {
    case 1:
      return numbers.view(at::kByte);
    case 2:
      return numbers.view(at::kShort);
    case 4:
      return numbers.view(at::kInt);
    default:
      return numbers.view(at::kLong);
  }
}

void check_kind(const at::Tensor& value, const at::Tensor& copy) {
  if (value.scalar_type() == copy.scalar_type() && value.sizes() == copy.sizes()) return;
  std::ostringstream message;
  message << "[gpipe] a parameter that several stages share is " << value.scalar_type() << value.sizes()
          << " on the rank that owns it, but " << copy.scalar_type() << copy.sizes()
          << " on this rank; convert the model on all ranks";
  throw std::runtime_error(message.str());
}

void set_value(const at::Tensor& copy, const at::Tensor& value) {
  auto present = copy.variable_data();
  const auto next = value.to(copy.device());
  if (at::equal(as_bits(present), as_bits(next))) return;
  present.copy_(next);
  if (!copy.is_inference()) torch::autograd::impl::bump_version(copy);
}

}  // namespace

void BorrowedValues::receive(Parcel& lent, at::Tensor copy) {
  auto& value = lent.tensors.front();
  {
    MutexLock lock(mutex_);
    if (const auto found = received_.find(copy.unsafeGetTensorImpl()); found != received_.end()) {
      wait(found->second, copy.device());
    } else {
      check_kind(value, copy);
      set_value(copy, value);
      if (copy.requires_grad() != lent.wants_gradient.front()) copy.set_requires_grad(lent.wants_gradient.front());
      received_.emplace(copy.unsafeGetTensorImpl(), record_event(copy.device()));
    }
  }
  if (value.device() == copy.device()) value = copy.detach();
  lent.renew_versions();
}

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

Edges::Edges(Pipeline& pipeline, const Program& program, Part part, const LayoutKey& key,
             std::shared_ptr<ByteCounter> counter)
    : pipeline_(pipeline),
      program_(program),
      counter_(std::move(counter)),
      slots_(2 * program.edges().size() * program.layout().micro_batches) {
  auto& team = pipeline_.team();
  if (team.size() == 1) return;
  remote_.emplace(*team.wires(), program, part, team.of_workers(), team.rank(), key, team.timeout());
  team.watch([this] { return remote_->activity(); });
}

Edges::~Edges() { pipeline_.team().watch({}); }

Edges::Slot& Edges::slot(int edge, const Action& action) {
  const std::size_t direction = action.kind == Kind::F ? 0 : 1;
  return slots_[(edge * 2 + direction) * program_.layout().micro_batches + action.micro_batch];
}

std::vector<Parcel> Edges::receive(const Action& action) {
  if (remote_) {
    remote_->receive(action, [&](const WireMessage& message, std::unique_ptr<Incoming> incoming) {
      take_message(message, std::move(incoming));
    });
  }
  std::vector<Parcel> parcels;
  for (const int edge : program_.wiring().takes(action)) parcels.push_back(take(edge, action));
  return parcels;
}

// Takes what an action of this kind has put on an edge, at its other end.
Parcel Edges::take(int edge, const Action& action) {
  auto [parcel, ready] = std::exchange(slot(edge, action), {});
  const auto& [from, to, name] = program_.edges()[edge];
  if (action.kind != Kind::F) {
    copy_to_device(parcel.tensors, ready, pipeline_.ends(edge).from, pipeline_.back_link(edge));
    return std::move(parcel);
  }
  if (parcel.changed()) {
    throw std::runtime_error("[gpipe] " + name + " was changed in place on its way from stage " + std::to_string(from) +
                             " to stage " + std::to_string(to) + "; change a clone instead");
  }
  copy_to_device(parcel.tensors, ready, pipeline_.ends(edge).to, pipeline_.link(edge));
  parcel.renew_versions();
  return std::move(parcel);
}

void Edges::send(const Action& action, std::vector<Parcel> parcels) {
  const auto edges = program_.wiring().puts(action);
  for (std::size_t k = 0; k < edges.size(); ++k) {
    const auto& ends = pipeline_.ends(edges[k]);
    const auto& edge = program_.edges()[edges[k]];
    const bool same_worker = pipeline_.worker_of(edge.from) == pipeline_.worker_of(edge.to);
    auto ready =
        same_worker ? StreamEvents() : record_events(parcels[k].tensors, action.kind == Kind::F ? ends.from : ends.to);
    slot(edges[k], action) = {std::move(parcels[k]), std::move(ready)};
  }
  if (remote_) remote_->send(action, [&](const WireMessage& message) { return to_message(message); });
}

DeviceLink* Edges::device_link(const WireMessage& message) const {
  const auto& edge = program_.edges()[message.edges.front()];
  const int from = pipeline_.worker_of(edge.from);
  const int to = pipeline_.worker_of(edge.to);
  return message.action.kind == Kind::F ? pipeline_.device_link(from, to) : pipeline_.device_link(to, from);
}

Outgoing Edges::to_message(const WireMessage& message) {
  std::vector<Parcel> parcels;
  for (const int edge : message.edges) {
    auto parcel = take(edge, message.action);
    if (message.action.kind == Kind::F) {
      parcels.push_back(std::move(parcel));
    } else {
      auto& gradients = parcels.emplace_back();
      for (auto& gradient : parcel.tensors) gradients.add(std::move(gradient), /*gradient_wanted=*/false);
    }
  }
  std::vector<at::Tensor> on_device;
  auto& team = pipeline_.team();
  auto outgoing = gpipe::to_message(std::move(parcels), team.rank(), team.codec(), &on_device);
  if (auto* link = device_link(message)) link->send(on_device);
  if (counter_) outgoing.owner = counted(std::move(outgoing.owner), counter_);
  return outgoing;
}

void Edges::take_message(const WireMessage& message, std::unique_ptr<Incoming> incoming) {
  auto parcels = to_parcels(std::move(incoming));
  if (parcels.size() != message.edges.size()) {
    throw std::runtime_error("[gpipe] a message for " + std::to_string(message.edges.size()) + " edges has " +
                             std::to_string(parcels.size()) + " parcels; run the same version of gpipe on all ranks");
  }
  StreamEvents ready;
  if (auto* link = device_link(message)) ready = link->receive(parcels);
  for (std::size_t k = 0; k < parcels.size(); ++k) {
    slot(message.edges[k], message.action) = {std::move(parcels[k]), ready};
  }
}

// Transfers between devices also end when a rank has failed.
void Edges::settle(int worker) {
  if (!remote_) return;
  remote_->settle(worker, [&](int from, int to) {
    auto* link = pipeline_.device_link(from, to);
    if (link == nullptr) return;
    link->settle(pipeline_.team().timeout());
    pipeline_.team().check();
  });
}

}  // namespace gpipe
