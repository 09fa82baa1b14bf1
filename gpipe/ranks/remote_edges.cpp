#include "gpipe/ranks/remote_edges.h"

#include <algorithm>

namespace gpipe {

Wires::Wires(Connections& connections, int first, std::chrono::milliseconds delivery, Allocate allocate)
    : connections_(connections), first_(first), delivery_(delivery), allocate_(std::move(allocate)) {}

WireSender& Wires::sender(int number, int to_rank) {
  auto& wire = senders_[number];
  if (!wire) wire = std::make_unique<WireSender>(connections_, to_rank, (first_ + number) * kTagsPerWire, delivery_);
  return *wire;
}

WireReceiver& Wires::receiver(int number, int from_rank, std::chrono::milliseconds limit) {
  auto& wire = receivers_[number];
  if (!wire)
    wire = std::make_unique<WireReceiver>(connections_, from_rank, (first_ + number) * kTagsPerWire, limit, allocate_);
  return *wire;
}

std::deque<LastLayout>& Wires::last_layouts(int number, const LayoutKey& key, std::size_t messages) {
  auto& of_wire = layouts_[number];
  const auto found = std::find_if(of_wire.begin(), of_wire.end(), [&](const auto& each) { return each.first == key; });
  if (found != of_wire.end()) {
    of_wire.splice(of_wire.end(), of_wire, found);
  } else {
    if (of_wire.size() == kKeysPerWire) of_wire.pop_front();
    of_wire.emplace_back(key, 0);
  }
  auto& layouts = of_wire.back().second;
  if (layouts.size() < messages) layouts.resize(messages);
  return layouts;
}

void Wires::finish() {
  for (const auto& [number, sender] : senders_) sender->finish();
}

RemoteEdges::RemoteEdges(Wires& wires, const Program& program, Part part, const std::vector<int>& ranks, int rank,
                         const LayoutKey& key, std::chrono::milliseconds limit)
    : program_(program),
      part_(part),
      ranks_(ranks),
      rank_(rank),
      sending_(program.workers()),
      ended_(program.workers()),
      arrived_(2 * program.edges().size() * program.layout().micro_batches),
      activities_(program.workers()) {
  for (auto& plan : plan_wires(program, part, ranks)) {
    const int number = plan.from * program.workers() + plan.to;
    if (is_here(plan.from)) {
      auto& layouts = wires.last_layouts(number, key, plan.messages.size());
      sending_[plan.from].push_back(
          {&wires.sender(number, ranks[plan.to]), plan.to, ranks[plan.to], std::move(plan.messages), &layouts});
    } else if (is_here(plan.to)) {
      auto& layouts = wires.last_layouts(number, key, plan.messages.size());
      auto& wire = wires.receiver(number, ranks[plan.from], limit);
      std::vector<LastLayout*> expected;
      for (std::size_t i = 0; i < plan.messages.size(); ++i) expected.push_back(&layouts[i]);
      wire.expect(std::move(expected));
      receiving_[{plan.from, plan.to}] = {&wire, ranks[plan.from], std::move(plan.messages)};
    }
  }
}

char& RemoteEdges::arrived(int edge, const Action& action) {
  const std::size_t direction = action.kind == Kind::F ? 0 : 1;
  return arrived_[(edge * 2 + direction) * program_.layout().micro_batches + action.micro_batch];
}

void RemoteEdges::receive(const Action& action, Arrived put_on) {
  const auto& placement = program_.layout().placement;
  const int worker = placement[action.stage];
  for (const int edge : program_.wiring().takes(action)) {
    const auto& ends = program_.edges()[edge];
    const int from = placement[action.kind == Kind::F ? ends.from : ends.to];
    if (is_here(from)) continue;
    auto& wire = receiving_.at({from, worker});
    while (!arrived(edge, action)) {
      const auto& message = wire.messages.at(wire.next++);
      set_activity(worker, {.awaits = wire.rank});
      auto received = wire.wire->receive(message.label());
      put_on(message, std::move(received));
      for (const int of_message : message.edges) arrived(of_message, message.action) = 1;
    }
  }
  set_activity(worker, {.runs = action});
}

void RemoteEdges::send(const Action& action, MakeMessage make) {
  const int worker = program_.layout().placement[action.stage];
  for (auto& wire : sending_[worker]) {
    if (wire.next == wire.messages.size() || wire.messages[wire.next].action != action) continue;
    const auto& message = wire.messages[wire.next];
    auto contents = make(message);
    set_activity(worker, {.awaits = wire.rank});
    wire.wire->send((*wire.layouts)[wire.next++], message.label(), std::move(contents));
  }
  if (action == program_.actions(worker, part_).back()) ended_[worker] = 1;
  set_activity(worker, {});
}

void RemoteEdges::settle(int worker, Settle settle) {
  if (ended_[worker] == 0) return;
  for (const auto& wire : sending_[worker]) {
    set_activity(worker, {.awaits = wire.rank});
    settle(worker, wire.to);
  }
  for (const auto& [ends, wire] : receiving_) {
    if (ends.second != worker) continue;
    set_activity(worker, {.awaits = wire.rank});
    settle(ends.first, worker);
  }
  set_activity(worker, {});
}

void RemoteEdges::set_activity(int worker, Activity activity) {
  MutexLock lock(mutex_);
  activities_[worker] = activity;
}

Activity RemoteEdges::activity(int worker) const {
  MutexLock lock(mutex_);
  return activities_[worker];
}

Activity RemoteEdges::activity() const {
  MutexLock lock(mutex_);
  Activity found;
  for (const auto& activity : activities_) {
    if (activity.runs) return activity;
    if (activity.awaits >= 0) found = activity;
  }
  return found;
}

}  // namespace gpipe
