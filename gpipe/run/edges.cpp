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

std::map<int, DeviceLink*> Edges::links_of(int worker) {
  std::map<int, DeviceLink*> links;
  for (int other = 0; other < pipeline_.workers(); ++other) {
    for (auto* link : {pipeline_.device_link(worker, other), pipeline_.device_link(other, worker)}) {
      if (link != nullptr) links[pipeline_.team().of_workers()[other]] = link;
    }
  }
  return links;
}

void Edges::await(int worker, const StreamEvent& event) {
  auto& team = pipeline_.team();
  if (!team.has_device_wires()) return event->synchronize();
  constexpr std::chrono::microseconds kQueryInterval{50};
  const auto end = end_after(team.timeout());
  while (!event->query()) {
    if (std::chrono::steady_clock::now() >= end) {
      const auto links = links_of(worker);
      if (links.empty()) return event->synchronize();
      if (links.size() == 1) throw TimeoutError(links.begin()->first);
      const auto add = [](std::string* text, const auto& link) { absl::StrAppend(text, link.first); };
      throw ConnectionError(absl::StrCat("the device of worker ", worker,
                                         " has not finished in time, maybe because one of the ranks ",
                                         absl::StrJoin(links, ", ", add), " has stopped"));
    }
    std::this_thread::sleep_for(kQueryInterval);
  }
}

void Edges::settle(int worker) {
  auto& team = pipeline_.team();
  if (!team.has_device_wires() || team.has_failed()) return;
  // Any link, because all transfers of the worker run in turn on one stream.
  const auto links = links_of(worker);
  if (!links.empty()) await(worker, links.begin()->second->end());
  team.check();
}

}  // namespace gpipe
