#include "gpipe/simulator.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>

#include "absl/strings/str_format.h"
#include "gpipe/schedule/replay.h"

namespace gpipe {
namespace {

using absl::StrFormat;

bool is_duration(double seconds) { return std::isfinite(seconds) && seconds >= 0; }

void check(const Program& program, const Costs& costs) {
  const auto& edges = program.edges();
  if (costs.actions.size() != static_cast<std::size_t>(program.layout().stages)) {
    throw std::invalid_argument(
        StrFormat("simulate: got costs for %d stages, but the program has %d stages: give one per stage",
                  costs.actions.size(), program.layout().stages));
  }
  if (costs.edges.size() != edges.size()) {
    throw std::invalid_argument(
        StrFormat("simulate: got costs for %d edges, but the program has %d edges: give one per edge",
                  costs.edges.size(), edges.size()));
  }
  if (!costs.sending.empty() && costs.sending.size() != edges.size()) {
    throw std::invalid_argument(StrFormat(
        "simulate: got times of sending for %d edges, but the program has %d edges: give one per edge, or none",
        costs.sending.size(), edges.size()));
  }
  if (!costs.stored.empty() && costs.stored.size() != costs.actions.size()) {
    throw std::invalid_argument(
        StrFormat("simulate: got costs of stored forwards for %d stages, but the program has %d stages: give one per "
                  "stage, or none",
                  costs.stored.size(), costs.actions.size()));
  }
  if (!costs.bytes.empty() && costs.bytes.size() != costs.actions.size()) {
    throw std::invalid_argument(
        StrFormat("simulate: got bytes for %d stages, but the program has %d stages: give one per stage, or none",
                  costs.bytes.size(), program.layout().stages));
  }
  for (std::size_t s = 0; s < costs.actions.size(); ++s) {
    for (std::size_t kind = 0; kind < costs.actions[s].size(); ++kind) {
      if (is_duration(costs.actions[s][kind])) continue;
      throw std::invalid_argument(
          StrFormat("simulate: action %c of stage %d costs %g s: give a finite time of at least 0",
                    to_char(static_cast<Kind>(kind)), s, costs.actions[s][kind]));
    }
  }
  for (std::size_t s = 0; s < costs.stored.size(); ++s) {
    if (is_duration(costs.stored[s])) continue;
    throw std::invalid_argument(
        StrFormat("simulate: a stored F of stage %d costs %g s: give a finite time of at least 0", s, costs.stored[s]));
  }
  for (std::size_t e = 0; e < edges.size(); ++e) {
    if (is_duration(costs.edges[e])) continue;
    throw std::invalid_argument(StrFormat("simulate: edge %d ('%s') costs %g s: give a finite time of at least 0", e,
                                          edges[e].name, costs.edges[e]));
  }
  for (std::size_t e = 0; e < costs.sending.size(); ++e) {
    if (is_duration(costs.sending[e]) && costs.sending[e] <= costs.edges[e]) continue;
    throw std::invalid_argument(
        StrFormat("simulate: edge %d ('%s') sends for %g s: give a time from 0 to its cost, %g s", e, edges[e].name,
                  costs.sending[e], costs.edges[e]));
  }
}

int peak_cells(const std::vector<Action>& list, bool has_backward) {
  if (!has_backward) return 1;
  int live = 0;
  int peak = 0;
  for (const Action& action : list) {
    if (action.kind == Kind::F) peak = std::max(peak, ++live);
    if (action.kind == Kind::B || action.kind == Kind::W) --live;
  }
  return peak;
}

}  // namespace

Simulation simulate(const Program& program, const Costs& costs) {
  check(program, costs);
  const auto seconds = [&](const Action& action) {
    if (action.kind == Kind::F && !costs.stored.empty() && program.recomputes(action.stage, action.micro_batch)) {
      return costs.stored[action.stage];
    }
    return costs.actions[action.stage][static_cast<std::size_t>(action.kind)];
  };
  const Replay result = replay(program.layout(), program.edges(), program.wiring(), program.schedule(), seconds,
                               costs.edges, costs.sending);
  Simulation simulation;
  simulation.timeline.workers = program.workers();
  simulation.timeline.edges = program.edges();
  for (const auto& spans : result.spans) {
    simulation.timeline.spans.insert(simulation.timeline.spans.end(), spans.begin(), spans.end());
  }
  if (!costs.bytes.empty()) account(simulation.timeline, costs.bytes);
  simulation.makespan = simulation.timeline.makespan();
  simulation.bubble = simulation.timeline.bubble();
  for (const auto& list : program.schedule()) {
    simulation.peak_cells.push_back(peak_cells(list, program.has_backward()));
  }
  return simulation;
}

}  // namespace gpipe
