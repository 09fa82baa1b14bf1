#include "gpipe/schedule/capacity.h"

#include <algorithm>

#include "gpipe/schedule/verifier.h"

namespace gpipe {
namespace {

// Per stage: the most cells at once between F and B or I.
std::vector<int> most_sending(const Layout& layout, const Schedule& schedule) {
  std::vector<int> now(layout.stages);
  std::vector<int> most(layout.stages);
  for (const auto& list : schedule) {
    for (const Action& action : list) {
      if (action.stage < 0 || action.stage >= layout.stages) continue;
      if (action.kind == Kind::F) most[action.stage] = std::max(most[action.stage], ++now[action.stage]);
      if (action.kind == Kind::B || action.kind == Kind::I) --now[action.stage];
    }
  }
  return most;
}

std::vector<Edge> with_capacities(std::vector<Edge> edges, const std::vector<int>& capacities) {
  for (std::size_t e = 0; e < edges.size(); ++e) edges[e].capacity = capacities[e];
  return edges;
}

}  // namespace

std::vector<int> sufficient_capacities(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule) {
  const auto sending = most_sending(layout, schedule);
  std::vector<int> capacities;
  for (const Edge& edge : edges) {
    const bool valid = edge.from >= 0 && edge.from < layout.stages;
    capacities.push_back(valid ? std::max(1, sending[edge.from]) : 1);
  }
  return capacities;
}

std::vector<int> least_capacities(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule) {
  const auto sufficient = sufficient_capacities(layout, edges, schedule);
  auto least = sufficient;
  for (std::size_t e = 0; e < edges.size(); ++e) {
    auto capacities = sufficient;
    int low = 1;
    int high = sufficient[e];
    while (low < high) {
      capacities[e] = low + (high - low) / 2;
      if (verify(layout, with_capacities(edges, capacities), schedule).ok()) {
        high = capacities[e];
      } else {
        low = capacities[e] + 1;
      }
    }
    least[e] = low;
  }
  return least;
}

}  // namespace gpipe
