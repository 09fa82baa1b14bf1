#include "gpipe/simulator.h"

#include <cmath>

#include "gpipe/base/checks.h"
#include "gpipe/schedule/verifier.h"

namespace gpipe {
namespace {

using absl::StrFormat;

void check_size(const char* what, std::size_t size, std::size_t wanted, const char* of, bool optional) {
  if (size == wanted || (optional && size == 0)) return;
  throw invalid("simulate: got %s for %d %ss, but the program has %d %ss: give one per %s%s", what, size, of, wanted,
                of, of, optional ? ", or none" : "");
}

void check_duration(double seconds, absl::FunctionRef<std::string()> what) {
  if (std::isfinite(seconds) && seconds >= 0) return;
  throw invalid("simulate: %s costs %g s: give a finite time of at least 0", what(), seconds);
}

void check(const Program& program, const Costs& costs) {
  const auto stages = static_cast<std::size_t>(program.layout().stages);
  const auto& edges = program.edges();
  check_size("costs", costs.actions.size(), stages, "stage", /*optional=*/false);
  check_size("costs", costs.edges.size(), edges.size(), "edge", /*optional=*/false);
  check_size("times of sending", costs.sending.size(), edges.size(), "edge", /*optional=*/true);
  check_size("costs of stored forwards", costs.stored.size(), stages, "stage", /*optional=*/true);
  check_size("bytes", costs.bytes.size(), stages, "stage", /*optional=*/true);
  for (std::size_t s = 0; s < stages; ++s) {
    for (const Kind kind : {Kind::F, Kind::R, Kind::B, Kind::I, Kind::W}) {
      check_duration(costs.actions[s][static_cast<std::size_t>(kind)],
                     [&] { return StrFormat("action %c of stage %d", to_char(kind), s); });
    }
    if (!costs.stored.empty()) check_duration(costs.stored[s], [&] { return StrFormat("a stored F of stage %d", s); });
  }
  for (std::size_t e = 0; e < edges.size(); ++e) {
    const auto edge = [&] { return StrFormat("edge %d ('%s')", e, edges[e].name); };
    check_duration(costs.edges[e], edge);
    if (costs.sending.empty() || (costs.sending[e] >= 0 && costs.sending[e] <= costs.edges[e])) continue;
    throw invalid("simulate: %s sends for %g s: give a time from 0 to its cost, %g s", edge(), costs.sending[e],
                  costs.edges[e]);
  }
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
    simulation.peak_cells.push_back(program.has_backward() ? peak_cells(list) : 1);
  }
  return simulation;
}

}  // namespace gpipe
