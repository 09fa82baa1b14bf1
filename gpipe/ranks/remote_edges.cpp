#include "gpipe/ranks/remote_edges.h"

#include <algorithm>

namespace gpipe {

std::uint64_t WireMessage::label() const {
  return static_cast<std::uint64_t>(action.micro_batch) << 32 | static_cast<std::uint64_t>(action.stage) << 8 |
         static_cast<std::uint64_t>(action.kind);
}

std::vector<WirePlan> plan_wires(const Program& program, Part part, const std::vector<int>& ranks) {
  const auto& placement = program.layout().placement;
  std::map<std::pair<int, int>, std::vector<WireMessage>> wires;
  for (int from = 0; from < program.workers(); ++from) {
    for (const auto& action : program.actions(from, part)) {
      std::map<int, std::vector<int>> receivers;
      for (const int edge : program.wiring().puts(action)) {
        const auto& ends = program.edges()[edge];
        const int to = placement[action.kind == Kind::F ? ends.to : ends.from];
        if (ranks[to] != ranks[from]) receivers[to].push_back(edge);
      }
      for (auto& [to, edges] : receivers) wires[{from, to}].push_back({action, std::move(edges)});
    }
  }
  std::vector<WirePlan> plans;
  for (auto& [ends, messages] : wires) plans.push_back({ends.first, ends.second, std::move(messages)});
  return plans;
}

Wires::Wires(Connections& connections, int first, int count, std::chrono::milliseconds delivery, Allocate allocate)
    : connections_(connections), first_(first), count_(count), delivery_(delivery), allocate_(std::move(allocate)) {}

Wires::~Wires() { connections_.end_tags(first_tag(0), first_tag(count_)); }

WireSender& Wires::sender(int number, int to_rank) {
  return senders_.try_emplace(number, connections_, to_rank, first_tag(number), delivery_).first->second;
}

WireReceiver& Wires::receiver(int number, int from_rank, std::chrono::milliseconds limit) {
  return receivers_.try_emplace(number, connections_, from_rank, first_tag(number), limit, allocate_).first->second;
}

std::deque<LastLayout>& Wires::last_layouts(int number, const LayoutKey& key, std::size_t messages) {
  auto& of_wire = layouts_[number];
  if (of_wire.size() == kKeysPerWire && !of_wire.contains(key)) of_wire.clear();
  auto& layouts = of_wire[key];
  if (layouts.size() < messages) layouts.resize(messages);
  return layouts;
}

RemoteEdges::RemoteEdges(Wires& wires, const Program& program, Part part, const std::vector<int>& ranks, int rank,
                         const LayoutKey& key, std::chrono::milliseconds limit)
    : program_(program),
      part_(part),
      ranks_(ranks),
      rank_(rank),
      sending_(program.workers()),
      receiving_(program.workers()),
      ended_(program.workers()),
      arrived_(2 * program.edges().size() * program.layout().micro_batches),
      activities_(program.workers()) {
  for (auto& plan : plan_wires(program, part, ranks)) {
    const auto [from, to, messages] = std::tuple(plan.from, plan.to, plan.messages.size());
    const int number = from * program.workers() + to;
    if (is_here(from)) {
      auto& wire = sending_[from].emplace_back(Wire{std::move(plan), ranks[to]});
      wire.sender = &wires.sender(number, wire.rank);
      wire.layouts = &wires.last_layouts(number, key, messages);
    } else if (is_here(to)) {
      auto& wire = receiving_[to].emplace_back(Wire{std::move(plan), ranks[from]});
      wire.receiver = &wires.receiver(number, wire.rank, limit);
      wire.receiver->expect(wires.last_layouts(number, key, messages), messages);
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
    for (auto& wire : receiving_[worker]) {
      if (wire.plan.from != from) continue;
      while (!arrived(edge, action)) {
        const auto& message = wire.plan.messages.at(wire.next++);
        set_activity(worker, {.awaits = wire.rank});
        auto received = wire.receiver->receive(message.label());
        put_on(message, std::move(received));
        for (const int of_message : message.edges) arrived(of_message, message.action) = 1;
      }
    }
  }
  set_activity(worker, {.runs = action});
}

void RemoteEdges::send(const Action& action, MakeMessage make) {
  const int worker = program_.layout().placement[action.stage];
  for (auto& wire : sending_[worker]) {
    if (wire.next == wire.plan.messages.size() || wire.plan.messages[wire.next].action != action) continue;
    const auto& message = wire.plan.messages[wire.next];
    auto contents = make(message);
    set_activity(worker, {.awaits = wire.rank});
    wire.sender->send((*wire.layouts)[wire.next++], message.label(), std::move(contents));
  }
  if (action == program_.actions(worker, part_).back()) ended_[worker] = 1;
  set_activity(worker, {});
}

void RemoteEdges::settle(int worker, Settle settle) {
  if (ended_[worker] == 0) return;
  for (const auto* wires : {&sending_[worker], &receiving_[worker]}) {
    for (const auto& wire : *wires) {
      set_activity(worker, {.awaits = wire.rank});
      settle(wire.plan.from, wire.plan.to);
    }
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
