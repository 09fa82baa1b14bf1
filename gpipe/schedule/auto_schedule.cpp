#include "gpipe/schedule/auto_schedule.h"

#include <algorithm>

#include "gpipe/schedule/advice.h"
#include "gpipe/schedule/list_schedule.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

constexpr double kEqual = 1.01;        // times that differ by less are equal
constexpr double kPreferNames = 1.03;  // a schedule without a name is only used if it is faster by more

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
  auto spans = measured.spans;
  if (last_is_smaller) {
    std::erase_if(spans, [&](const Span& span) { return span.action.micro_batch == layout.micro_batches - 1; });
  }
  const auto least = [](const auto& seconds) { return std::ranges::min(seconds); };  // a step's first actions are slow
  auto costs = costs_of(spans, layout.stages, least);
  costs.edges.assign(edges.size(), 0);
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
