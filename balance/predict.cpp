#include "balance/predict.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "gpipe/schedule/generators.h"
#include "gpipe/schedule/schedule_source.h"
#include "gpipe/schedule/schedules.h"
#include "gpipe/schedule/simulator.h"

namespace gpipe {
namespace {

// In a step, the loss of a micro-batch takes the output. Its graph is taken to keep bytes of the output's size.
void give_outputs_to_loss(std::vector<CellBytes>& stages) {
  for (int stage = 0; stage < static_cast<int>(stages.size()); ++stage) {
    auto& cell = stages[stage];
    for (auto& held : cell.stored.held) {
      if (held.stage == Held::kForwards) held = {held.bytes, Kind::F, stage};
    }
    for (auto& held : cell.forward.held) {
      if (held.stage != Held::kForwards) continue;
      held = {held.bytes, Kind::W, stage};
      cell.recompute.held.push_back(held);
    }
  }
}

}  // namespace

Prediction predict(const Profile& profile, const std::vector<std::int64_t>& balance, const RunOptions& options) {
  const StageCost stage(profile);
  stage.check(options);
  auto costs = stage.costs(balance, options);
  const auto& scheduling = options.scheduling;
  const bool step = !scheduling.schedule.empty();
  if (step) give_outputs_to_loss(costs.bytes);
  const int stages = static_cast<int>(balance.size());
  const auto source = schedule_source(step ? scheduling.schedule : kFillAndDrain, stages, scheduling.stages_per_worker,
                                      scheduling.placement);
  const auto& placement = source.placement;
  const Layout layout{stages, static_cast<int>(options.chunks), placement};
  auto edges = stage.edges(balance);
  const auto bytes = stage.bytes_of_edges(balance);
  std::int64_t crossing = 0;
  for (std::size_t e = 0; e < edges.size(); ++e) {
    if (placement[edges[e].from] == placement[edges[e].to]) {
      costs.edges[e] = 0;
    } else {
      crossing += options.chunks * bytes[e];
    }
  }
  const auto program = make_program(layout, std::move(edges), source.make(layout, options.checkpoint));
  auto simulation = simulate(program, costs);
  Prediction prediction{.balance = balance,
                        .seconds = simulation.makespan,
                        .bubble = simulation.bubble,
                        .placement = placement,
                        .bytes = simulation.timeline.peak_bytes(),
                        .crossing = crossing,
                        .timeline = std::move(simulation.timeline)};
  auto alone = options;
  alone.bandwidth = 0;
  int first = 0;
  for (const int end : stage.ends(balance)) {
    prediction.bytes[placement[prediction.stages.size()]] += stage.static_bytes(first, end);
    prediction.stages.push_back(stage.seconds(first, end, alone));
    first = end;
  }
  return prediction;
}

}  // namespace gpipe
