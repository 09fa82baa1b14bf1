#include "gpipe/ranks/wire_plan.h"

#include <map>
#include <utility>

namespace gpipe {

std::uint64_t WireMessage::label() const {
  return static_cast<std::uint64_t>(action.micro_batch) << 32 | static_cast<std::uint64_t>(action.stage) << 8 |
         static_cast<std::uint64_t>(action.kind);
}

std::vector<int> ranks_of_workers(int workers, int ranks) {
  std::vector<int> of_workers;
  for (int w = 0; w < workers; ++w) {
    of_workers.push_back(static_cast<int>(static_cast<std::int64_t>(w) * ranks / workers));
  }
  return of_workers;
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

}  // namespace gpipe
