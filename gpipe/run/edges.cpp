#include "gpipe/run/edges.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_real.h>

#include <bit>

#include "gpipe/base/checks.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

// The elements as integers of their size, which are equal if all bits are.
at::Tensor as_bits(const at::Tensor& tensor) {
  constexpr at::ScalarType kIntegers[] = {at::kByte, at::kShort, at::kInt, at::kLong};  // of 1, 2, 4 and 8 bytes
  const auto numbers = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  return numbers.view(kIntegers[std::countr_zero(static_cast<unsigned>(numbers.element_size()))]);
}

void check_kind(const at::Tensor& value, const at::Tensor& copy) {
  if (value.scalar_type() == copy.scalar_type() && value.sizes() == copy.sizes()) return;
  throw_error("a parameter that several stages share is ", c10::str(value.scalar_type(), value.sizes()),
              " on the rank that owns it, but ", c10::str(copy.scalar_type(), copy.sizes()),
              " on this rank; convert the model on all ranks");
}

void set_value(const at::Tensor& copy, const at::Tensor& value) {
  auto present = copy.variable_data();
  const auto next = value.to(copy.device());
  if (at::equal(as_bits(present), as_bits(next))) return;
  present.copy_(next);
  if (!copy.is_inference()) torch::autograd::impl::bump_version(copy);
}

// Returns the same memory. When it is freed, on any thread, the counter learns of it.
std::shared_ptr<const void> counted(std::shared_ptr<const void> owner, std::shared_ptr<ByteCounter> counter) {
  const auto* memory = owner.get();
  return {memory, [owner = std::move(owner), counter = std::move(counter)](const void*) mutable {
            const AllocationListener::Scope counting(counter);
            owner.reset();
          }};
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

Edges::Edges(Pipeline& pipeline, const Program& program, Part part, const LayoutKey& key,
             std::shared_ptr<ByteCounter> counter, CallerInputs& inputs)
    : pipeline_(pipeline),
      program_(program),
      counter_(std::move(counter)),
      inputs_(inputs),
      slots_(2 * program.edges().size() * program.layout().micro_batches) {
  auto& team = pipeline_.team();
  if (team.size() == 1) return;
  remote_.emplace(team.wires(), program, part, team.of_workers(), team.rank(), key, team.timeout());
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
  if (action.kind == Kind::F && action.stage == 0) parcels.push_back(inputs_.receive(action.micro_batch));
  for (const int edge : program_.wiring().takes(action)) parcels.push_back(take(edge, action));
  return parcels;
}

// Takes what an action of this kind has put on an edge, at its other end.
Parcel Edges::take(int edge, const Action& action) {
  auto [parcel, ready] = std::exchange(slot(edge, action), {});
  const auto& [from, to, name] = program_.edges()[edge];
  const auto& ends = pipeline_.ends(edge);
  if (action.kind != Kind::F) {
    copy_to_device(parcel.tensors, ready, ends.from, ends.back_link);
    return std::move(parcel);
  }
  if (parcel.changed()) {
    throw_error("", name, " was changed in place on its way from stage ", from, " to stage ", to,
                "; change a clone instead");
  }
  copy_to_device(parcel.tensors, ready, ends.to, ends.link);
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
    auto& parcel = parcels.emplace_back(take(edge, message.action));
    parcel.wants_gradient.resize(parcel.tensors.size());  // a parcel of gradients has only its tensors
    parcel.alias_groups.resize(parcel.tensors.size());
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
    throw_error("a message for ", message.edges.size(), " edges has ", parcels.size(),
                " parcels; run the same version of gpipe on all ranks");
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
