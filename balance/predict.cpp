#include "balance/predict.h"

#include <algorithm>
#include <numeric>

#include "balance/stage_cost.h"
#include "gpipe/schedule/list_schedule.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

// In a step, the loss of a micro-batch takes the output. Its graph is taken to keep bytes of the output's size.
void give_outputs_to_loss(std::vector<CellBytes>& stages) {
  for (int stage = 0; auto& cell : stages) {
    for (auto& held : cell.stored.held) {
      if (held.until == Until::kForwardsEnd) held = {held.bytes, Until::kForward, stage};
    }
    for (auto& held : cell.forward.held) {
      if (held.until != Until::kForwardsEnd) continue;
      held = {held.bytes, Until::kLast, stage};
      cell.recompute.held.push_back(held);
    }
    ++stage;
  }
}

/// Seconds and bytes of the actions and edges of a step.
Costs costs_of(const StageCost& stage, const std::vector<std::int64_t>& balance, const RunOptions& options,
               const StageCost::SizedEdges& stage_edges) {
  auto costs = stage.costs(balance, options);
  if (!options.scheduling.schedule.empty()) give_outputs_to_loss(costs.bytes);
  const auto& placement = options.scheduling.placement;
  for (std::size_t e = 0; e < stage_edges.edges.size(); ++e) {
    const auto [from, to] = std::pair(placement[stage_edges.edges[e].from], placement[stage_edges.edges[e].to]);
    const auto link = from != to ? options.network.link(from, to) : LinkSpeed();
    costs.edges.push_back(link.seconds(stage_edges.bytes[e]));
    costs.sending.push_back(link.sending(stage_edges.bytes[e]));
  }
  return costs;
}

/// When the gradients of all stages are summed over the replicas. A worker begins to sum a stage's gradients after the
/// stage's last backward, one stage at a time.
double reduced(const StageCost& stage, const std::vector<int>& ends, const RunOptions& options,
               const Timeline& timeline) {
  std::vector<double> last(ends.size());
  for (const auto& span : timeline.spans) {
    const auto [kind, stage, micro_batch] = span.action;
    if (kind == Kind::B || kind == Kind::W) last[stage] = std::max(last[stage], span.end);
  }
  std::vector<std::size_t> order(ends.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return last[a] < last[b]; });
  std::vector<double> free(timeline.workers);
  for (const auto s : order) {
    const int worker = options.scheduling.placement[s];
    const auto gradients = stage.gradients(s == 0 ? 0 : ends[s - 1], ends[s]);
    free[worker] = std::max(free[worker], last[s]) + options.network.reduction(worker, gradients);
  }
  return *std::max_element(free.begin(), free.end());
}

}  // namespace

Prediction predict(const StageCost& stage, const std::vector<std::int64_t>& balance, const RunOptions& options) {
  stage.check(options);
  const auto& [schedule, per_worker, wanted, depth] = options.scheduling;
  const int stages = static_cast<int>(balance.size());
  const bool any = schedule.empty() || depth > 0;
  const auto source = schedule_source(any ? kFillAndDrain : schedule, stages, per_worker, wanted);
  auto placed = options;
  const auto& placement = placed.scheduling.placement = source.placement;
  const auto ends = stage.ends(balance);
  const auto stage_edges = stage.edges(balance, placement);
  const Layout layout{stages, options.chunks, placement};
  const auto& edges = stage_edges.edges;
  const auto costs = costs_of(stage, balance, placed, stage_edges);
  auto lists = depth > 0 ? list_schedule(layout, edges, costs, options.checkpoint, depth) : source.make(layout);
  const auto program = Program::make(layout, edges, with_recomputes(lists, options.checkpoint, layout));
  auto simulation = simulate(program, costs);
  Prediction prediction{{balance, placement}};
  for (std::size_t e = 0; e < edges.size(); ++e) {
    const auto& edge = edges[e];
    if (placement[edge.from] != placement[edge.to]) prediction.crossing += options.chunks * stage_edges.bytes[e];
  }
  prediction.seconds = std::max(simulation.makespan, reduced(stage, ends, placed, simulation.timeline));
  prediction.reduction = prediction.seconds - simulation.makespan;
  prediction.bubble = 1 - (1 - simulation.bubble) * simulation.makespan / prediction.seconds;
  prediction.bytes = simulation.timeline.peak_bytes();
  prediction.timeline = std::move(simulation.timeline);
  prediction.lists = std::move(lists);
  for (int first = 0, s = 0; const int end : ends) {
    prediction.bytes[placement[s]] +=
        stage.static_bytes(first, end) + stage.reduction_bytes(first, end, options.network);
    auto alone = options;
    alone.network = {};
    alone.checkpoint = options.checkpoint.of(s);
    prediction.stages.push_back(stage.seconds(first, end, alone));
    first = end;
    ++s;
  }
  return prediction;
}

Prediction predict(const Profile& profile, const std::vector<std::int64_t>& balance, const RunOptions& options) {
  return predict(StageCost(profile), balance, options);
}

}  // namespace gpipe
