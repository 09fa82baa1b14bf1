#include "gpipe/run/edges.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

void check_kind(const at::Tensor& value, const at::Tensor& copy) {
  if (value.scalar_type() == copy.scalar_type() && value.sizes() == copy.sizes()) return;
  throw_error("a parameter that several stages share is ", c10::str(value.scalar_type(), value.sizes()),
              " on the rank that owns it, but ", c10::str(copy.scalar_type(), copy.sizes()),
              " on this rank; convert the model on all ranks");
}

// A graph that has saved the copy notices a change of the owner's parameter, as it would in one process.
void set_value(const at::Tensor& copy, const at::Tensor& value) {
  copy.variable_data().copy_(value);
  set_version(copy, version_of(value));
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

Edges::Edges(Pipeline& pipeline, const Program& program, Part part, std::shared_ptr<ByteCounter> counter,
             CallerInputs& inputs)
    : pipeline_(pipeline), program_(program), inputs_(inputs), local_(program) {
  if (pipeline.team().size() == 1) return;
  const auto link = [&pipeline](int from, int to) { return pipeline.device_link(from, to); };
  remote_.emplace(pipeline.team(), program, part, link, std::move(counter));
}

bool Edges::is_remote(int edge) const {
  const auto& [from, to, name] = program_.edges()[edge];
  return pipeline_.rank_of(from) != pipeline_.rank_of(to);
}

std::vector<Parcel> Edges::receive(const Action& action) {
  const bool forward = action.kind == Kind::F;
  std::vector<Parcel> parcels;
  if (forward && action.stage == 0) parcels.push_back(inputs_.receive(action.micro_batch));
  for (const int edge : program_.wiring().takes(action)) {
    auto [parcel, ready] = is_remote(edge) ? remote_->take(edge, action) : local_.take(edge, action);
    const auto& [from, to, name] = program_.edges()[edge];
    if (forward && parcel.changed()) {
      throw_error("", name, " was changed in place on its way from stage ", from, " to stage ", to,
                  "; change a clone instead");
    }
    const auto& ends = pipeline_.ends(edge);
    copy_to_device(parcel.tensors, ready, forward ? ends.to : ends.from, forward ? ends.link : ends.back_link);
    if (forward) parcel.renew_versions();
    parcels.push_back(std::move(parcel));
  }
  return parcels;
}

void Edges::send(const Action& action, std::vector<Parcel> parcels) {
  const bool forward = action.kind == Kind::F;
  const auto edges = program_.wiring().puts(action);
  for (std::size_t k = 0; k < edges.size(); ++k) {
    const auto& ends = pipeline_.ends(edges[k]);
    const auto& edge = program_.edges()[edges[k]];
    auto& parcel = parcels[k];
    StreamEvents ready;
    if (pipeline_.worker_of(edge.from) != pipeline_.worker_of(edge.to)) {
      ready = record_events(parcel.tensors, forward ? ends.from : ends.to);
    }
    const auto& receiver = forward ? ends.to : ends.from;
    const auto& link = forward ? ends.link : ends.back_link;
    if (is_remote(edges[k])) {
      copy_to_device(parcel.tensors, ready, receiver, link);
      remote_->put(edges[k], action, std::move(parcel));
      continue;
    }
    if (receiver.is_cpu() && !ready.empty()) {
      ready = start_copies(parcel.tensors, ready, receiver, link);  // while the receiver computes
    }
    local_.put(edges[k], action, {std::move(parcel), std::move(ready)});
  }
}

void Edges::settle(int worker) {
  auto& team = pipeline_.team();
  if (!team.has_device_wires() || team.has_failed()) return;
  DeviceLink* link = nullptr;  // any, because all transfers of the worker run in turn on one stream
  std::set<int> others;
  for (int other = 0; other < pipeline_.workers(); ++other) {
    for (auto* each : {pipeline_.device_link(worker, other), pipeline_.device_link(other, worker)}) {
      if (each == nullptr) continue;
      link = each;
      others.insert(team.of_workers()[other]);
    }
  }
  if (link != nullptr && !link->settle(team.timeout())) {
    if (others.size() == 1) throw TimeoutError(*others.begin());
    throw ConnectionError(absl::StrCat("one of the ranks ", absl::StrJoin(others, ", "), " did not answer in time"));
  }
  team.check();
}

}  // namespace gpipe
