#include "balance/predictor.h"

#include <algorithm>
#include <numeric>

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

}  // namespace

Predictor::Predictor(const Profile& profile, int stages, RunOptions options)
    : stage_(profile),
      options_(std::move(options)),
      source_(schedule_source(options_.scheduling.schedule.empty() ? kFillAndDrain : options_.scheduling.schedule,
                              stages, options_.scheduling.stages_per_worker, options_.scheduling.placement)) {
  stage_.check(options_);
}

const Program& Predictor::program(const Layout& layout, const std::vector<Edge>& edges) {
  if (program_ && edges == program_->edges()) return *program_;
  program_ = Program::make(layout, edges, with_recomputes(source_.make(layout), options_.checkpoint, layout));
  return *program_;
}

Costs Predictor::costs(const std::vector<std::int64_t>& balance, const StageCost::SizedEdges& stage_edges) const {
  auto placed = options_;
  placed.scheduling.placement = source_.placement;
  auto costs = stage_.costs(balance, placed);
  if (!options_.scheduling.schedule.empty()) give_outputs_to_loss(costs.bytes);
  for (std::size_t e = 0; e < stage_edges.edges.size(); ++e) {
    const auto& edge = stage_edges.edges[e];
    const auto link =
        crosses(edge) ? options_.network.link(source_.placement[edge.from], source_.placement[edge.to]) : LinkSpeed();
    costs.edges.push_back(link.seconds(stage_edges.bytes[e]));
    costs.sending.push_back(link.sending(stage_edges.bytes[e]));
  }
  return costs;
}

bool Predictor::crosses(const Edge& edge) const { return source_.placement[edge.from] != source_.placement[edge.to]; }

std::vector<std::int64_t> Predictor::static_bytes(const std::vector<std::int64_t>& balance) const {
  std::vector<std::int64_t> bytes(1 + *std::max_element(source_.placement.begin(), source_.placement.end()));
  for (int first = 0, stage = 0; const int end : stage_.ends(balance)) {
    bytes[source_.placement[stage++]] +=
        stage_.static_bytes(first, end) + stage_.reduction_bytes(first, end, options_.network);
    first = end;
  }
  return bytes;
}

// A worker begins to sum a stage's gradients after the stage's last backward, one stage at a time.
double Predictor::reduced(const std::vector<int>& ends, const Timeline& timeline) const {
  std::vector<double> last(ends.size());
  for (const auto& span : timeline.spans) {
    const auto [kind, stage, micro_batch] = span.action;
    if (kind == Kind::B || kind == Kind::W) last[stage] = std::max(last[stage], span.end);
  }
  std::vector<std::size_t> order(ends.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return last[a] < last[b]; });
  std::vector<double> free(timeline.workers);
  for (const auto stage : order) {
    const int worker = source_.placement[stage];
    const auto gradients = stage_.gradients(stage == 0 ? 0 : ends[stage - 1], ends[stage]);
    free[worker] = std::max(free[worker], last[stage]) + options_.network.reduction(worker, gradients);
  }
  return *std::max_element(free.begin(), free.end());
}

Prediction Predictor::predict(const std::vector<std::int64_t>& balance) {
  const auto stage_edges = stage_.edges(balance, source_.placement);
  Prediction prediction{{balance, source_.placement}};
  for (std::size_t e = 0; e < stage_edges.edges.size(); ++e) {
    if (crosses(stage_edges.edges[e])) prediction.crossing += options_.chunks * stage_edges.bytes[e];
  }
  const Layout layout{static_cast<int>(balance.size()), options_.chunks, source_.placement};
  auto simulation = simulate(program(layout, stage_edges.edges), costs(balance, stage_edges));
  const auto ends = stage_.ends(balance);
  prediction.seconds = std::max(simulation.makespan, reduced(ends, simulation.timeline));
  prediction.reduction = prediction.seconds - simulation.makespan;
  prediction.bubble = 1 - (1 - simulation.bubble) * simulation.makespan / prediction.seconds;
  prediction.bytes = simulation.timeline.peak_bytes();
  prediction.timeline = std::move(simulation.timeline);
  const auto kept = static_bytes(balance);
  for (std::size_t w = 0; w < kept.size(); ++w) prediction.bytes[w] += kept[w];
  auto alone = options_;
  alone.network = {};
  for (int first = 0; const int end : ends) {
    prediction.stages.push_back(stage_.seconds(first, end, alone));
    first = end;
  }
  return prediction;
}

Prediction predict(const Profile& profile, const std::vector<std::int64_t>& balance, const RunOptions& options) {
  return Predictor(profile, static_cast<int>(balance.size()), options).predict(balance);
}

}  // namespace gpipe
