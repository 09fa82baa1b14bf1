#include "gpipe/schedule/auto_schedule.h"

#include <algorithm>
#include <limits>
#include <set>

#include "gpipe/schedule/list_schedule.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"
#include "gpipe/simulator.h"

namespace gpipe {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::infinity();
constexpr double kEqual = 1.01;        // times that differ by less are equal
constexpr double kPreferNames = 1.03;  // a schedule without a name is only used if it is faster by more

// The shortest action of each kind and stage: the first ones of a step are slow.
Costs costs_of(const Timeline& timeline, const Layout& layout, bool last_is_smaller) {
  const int m = layout.micro_batches;
  Costs costs;
  costs.actions.assign(layout.stages, {kUnknown, kUnknown, kUnknown, kUnknown, kUnknown});
  costs.stored.assign(layout.stages, kUnknown);
  costs.edges.assign(timeline.edges.size(), 0);
  std::set<std::pair<int, int>> recomputed;  // stage and micro-batch
  for (const auto& span : timeline.spans) {
    if (span.action.kind == Kind::R) recomputed.emplace(span.action.stage, span.action.micro_batch);
  }
  for (const auto& span : timeline.spans) {
    const auto& [kind, stage, micro_batch] = span.action;
    if (last_is_smaller && micro_batch == m - 1) continue;
    const bool stored = kind == Kind::F && recomputed.contains({stage, micro_batch});
    // at(), because other ranks have sent spans.
    auto& least = stored ? costs.stored.at(stage) : costs.actions.at(stage).at(static_cast<std::size_t>(kind));
    least = std::min(least, span.end - span.start);
  }
  for (int s = 0; s < layout.stages; ++s) {
    auto& [forward, recompute, backward, input, weight] = costs.actions[s];
    auto& stored = costs.stored[s];
    if (forward == kUnknown) forward = stored;
    if (stored == kUnknown) stored = forward;
    if (recompute == kUnknown) recompute = 0;
    if (input == kUnknown) std::tie(input, weight) = std::pair(backward, 0.0);  // no backward was split
    if (backward == kUnknown) backward = input + weight;
  }
  return costs;
}

// The schedule whose backwards measuring_schedule() splits.
Schedule measured_schedule(const Layout& layout) {
  for (const auto name : {"1f1b", "interleaved_1f1b"}) {
    if (schedule_rule(name).misfit(layout).empty()) return schedule_rule(name).generate(layout);
  }
  return list_schedule(layout);
}

// The most cells and the most graphs that a worker holds at once.
std::pair<int, int> held(const ScheduleFunction& make, Layout layout, const std::vector<Edge>& edges,
                         const Checkpoints& checkpoints) {
  layout.micro_batches = std::max(layout.micro_batches, 2 * layout.workers());  // from then on it does not change
  const auto peaks = verify(layout, edges, with_recomputes(make(layout), checkpoints, layout));
  std::vector<int> cells(layout.workers());
  std::vector<int> graphs(layout.workers());
  for (int s = 0; s < layout.stages; ++s) {
    cells[layout.placement[s]] += peaks.live[s];
    graphs[layout.placement[s]] += peaks.graphs[s];
  }
  return {std::ranges::max(cells), std::ranges::max(graphs)};
}

}  // namespace

Schedule measuring_schedule(const Layout& layout) {
  auto schedule = measured_schedule(layout);
  for (auto& list : schedule) {
    std::vector<Action> actions;
    for (auto action : list) {
      if (action.kind == Kind::W) continue;
      if (action.kind != Kind::F) action.kind = action.micro_batch % 2 == 1 ? Kind::I : Kind::B;
      actions.push_back(action);
      if (action.kind == Kind::I) actions.push_back({Kind::W, action.stage, action.micro_batch});
    }
    list = std::move(actions);
  }
  return schedule;
}

std::string fastest_schedule(const Timeline& measured, const Layout& layout, const Checkpoints& checkpoints,
                             bool last_is_smaller, bool saves_memory) {
  const auto& edges = measured.edges;
  const auto costs = costs_of(measured, layout, last_is_smaller);
  const auto most = held(measured_schedule, layout, edges, checkpoints);
  struct Candidate {
    std::string schedule;
    double seconds = 0;
    int cells = 0;
  };
  std::vector<Candidate> candidates;
  // A `name` that is empty stands for lists.
  const auto offer = [&](std::string_view name, const ScheduleFunction& make) {
    const auto [cells, graphs] = held(make, layout, edges, checkpoints);
    if (saves_memory && (cells > most.first || graphs > most.second)) return;
    auto schedule = make(layout);
    auto given = name.empty() ? to_text(schedule) : std::string(name);
    const auto program = Program::make(layout, edges, with_recomputes(std::move(schedule), checkpoints, layout));
    const double seconds = simulate(program, costs).makespan;
    candidates.push_back({std::move(given), name.empty() ? kPreferNames * seconds : seconds, cells});
  };
  for (const auto& rule : schedule_rules()) {
    if (fills_and_drains(rule.name) || !rule.misfit(layout).empty() ||
        !too_few_stages(rule.name, layout.placement).empty()) {
      continue;
    }
    offer(rule.name, [&](const Layout& other) { return rule.generate(other); });
  }
  offer("", measured_schedule);
  for (const int depth : {layout.workers(), 2 * layout.workers() - 1}) {
    offer("", [&](const Layout& other) { return list_schedule(other, edges, costs, checkpoints, depth); });
  }
  const double fastest = std::ranges::min(candidates, {}, &Candidate::seconds).seconds;
  const auto cells = [&](const Candidate& it) { return it.seconds <= fastest * kEqual ? it.cells : kMostCells; };
  return std::ranges::min(candidates, {}, cells).schedule;
}

}  // namespace gpipe
