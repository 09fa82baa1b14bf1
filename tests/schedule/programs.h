#pragma once

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <random>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include "gpipe/program.h"
#include "gpipe/schedules.h"
#include "tests/support/matchers.h"

namespace gpipe::testing {

/// The inverse of to_string(Action).
inline Action action(const std::string& text) {
  Action result;
  char letter = 0;
  std::istringstream(text) >> result.stage >> letter >> result.micro_batch;
  const auto kind = std::string("FRBIW").find(letter);
  result.kind = static_cast<Kind>(kind);
  if (kind == std::string::npos || to_string(result) != text) throw std::invalid_argument("not an action: " + text);
  return result;
}

/// Makes a schedule from one string of actions per worker.
inline Schedule lists(std::initializer_list<std::string> workers) {
  Schedule result;
  for (const std::string& worker : workers) {
    auto& list = result.emplace_back();
    std::istringstream in(worker);
    for (std::string word; in >> word;) list.push_back(action(word));
  }
  return result;
}

inline Layout layout_of(std::vector<int> placement, int micro_batches) {
  return {static_cast<int>(placement.size()), micro_batches, std::move(placement)};
}

inline Layout looped(int workers, int stages_per_worker, int micro_batches) {
  return layout_of(looped_placement(workers, workers * stages_per_worker), micro_batches);
}

/// One stage per worker.
inline Layout straight(int stages, int micro_batches) { return looped(stages, 1, micro_batches); }

inline Layout v_shaped(int workers, int micro_batches) { return layout_of(v_placement(2 * workers), micro_batches); }

/// The activations between neighbouring stages, and skips.
inline std::vector<Edge> chain(int stages, const std::vector<LayerLink>& skips = {}) {
  return cut_edges(std::vector<std::int64_t>(stages, 1), skips);
}

/// Every pair of stages has an edge.
inline std::vector<Edge> all_pairs(int stages) {
  std::vector<Edge> edges;
  for (int from = 0; from < stages; ++from) {
    for (int to = from + 1; to < stages; ++to) edges.push_back({from, to, ""});
  }
  return edges;
}

/// A schedule on a model without skips.
inline Program plain_program(const Layout& layout, Schedule schedule) {
  return Program::make(layout, chain(layout.stages), std::move(schedule));
}

/// GPipe's program of a model without skips.
inline Program gpipe_program(const Layout& layout, Checkpoint checkpoint = Checkpoint::kExceptLast) {
  return plain_program(layout, fill_drain(layout, checkpoint));
}

/// The error of Program::make(); "" if there is none.
inline std::string refusal(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule) {
  return error_of<std::invalid_argument>([&] { Program::make(layout, edges, schedule); });
}

/// The executor's rules in a simple form: what the actions so far have sent.
class Sent {
 public:
  explicit Sent(std::vector<Edge> edges) : edges_(std::move(edges)) {}

  /// Whether all that the action takes has been sent.
  bool reaches(const Action& action) const {
    const bool forward = action.kind == Kind::F;
    return !exchanges(action) || std::all_of(edges_.begin(), edges_.end(), [&](const Edge& edge) {
      const auto [from, to] = forward ? std::pair(edge.from, edge.to) : std::pair(edge.to, edge.from);
      return to != action.stage || sent_.contains({forward, from, action.micro_batch});
    });
  }
  void add(const Action& action) {
    if (exchanges(action)) sent_.insert({action.kind == Kind::F, action.stage, action.micro_batch});
  }

 private:
  static bool exchanges(const Action& action) { return action.kind != Kind::R && action.kind != Kind::W; }

  std::vector<Edge> edges_;
  std::set<std::tuple<bool, int, int>> sent_;  // whether forward, from which stage, micro-batch
};

/// The arguments of Program::make.
struct Parts {
  Layout layout;
  std::vector<Edge> edges;
  Schedule schedule;
};

/// A random schedule that satisfies rules 1 to 3 of the verifier. It may deadlock.
inline Parts random_parts(std::mt19937& random) {
  const auto pick = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  const int stages = pick(1, 5);
  const int workers = pick(1, stages);
  const int micro_batches = pick(1, 5);
  std::vector<int> placement;
  for (int s = 0; s < stages; ++s) placement.push_back(s < workers ? s : pick(0, workers - 1));
  std::shuffle(placement.begin(), placement.end(), random);
  Parts parts{layout_of(placement, micro_batches), {}, Schedule(workers)};

  for (const Edge& edge : all_pairs(stages)) {
    if (edge.to == edge.from + 1 || pick(0, 3) == 0) parts.edges.push_back(edge);
  }
  std::shuffle(parts.edges.begin(), parts.edges.end(), random);

  // Lists each cell's actions in order, then repeatedly draws a cell and appends its next action. If `data_first`,
  // draws only cells whose next action has its data, so that the schedule runs.
  const bool backward = pick(0, 5) != 0;
  const bool data_first = pick(0, 3) != 0;
  std::vector<std::deque<Action>> cells;
  for (int s = 0; s < stages; ++s) {
    for (int m = 0; m < micro_batches; ++m) {
      auto& cell = cells.emplace_back(1, Action{Kind::F, s, m});
      if (!backward) continue;
      if (pick(0, 1) == 0) cell.push_back({Kind::R, s, m});
      const bool whole = pick(0, 1) == 0;
      for (const Kind kind : whole ? std::vector{Kind::B} : std::vector{Kind::I, Kind::W}) cell.push_back({kind, s, m});
    }
  }
  Sent sent(parts.edges);
  while (true) {
    std::vector<std::deque<Action>*> open;
    for (auto& cell : cells) {
      if (!cell.empty() && (!data_first || sent.reaches(cell.front()))) open.push_back(&cell);
    }
    if (open.empty()) return parts;
    // Prefers the first open cell, so that the lists resemble real schedules.
    auto& cell = *open[pick(0, 1) == 0 ? 0 : pick(0, static_cast<int>(open.size()) - 1)];
    sent.add(cell.front());
    parts.schedule[placement[cell.front().stage]].push_back(cell.front());
    cell.pop_front();
  }
}

inline const std::vector<int> kMicroBatches = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 23, 32, 40, 64};

/// Calls f(name, layout) for every named schedule and the looped and V layouts that it fits, with up to `most_workers`
/// workers and `most_loops` stages on each.
template <typename F>
void for_each_shape(int most_workers, int most_loops, const std::vector<int>& micro_batches, F f) {
  for (int p = 1; p <= most_workers; ++p) {
    for (const int m : micro_batches) {
      std::vector<Layout> layouts;
      for (int v = 1; v <= most_loops; ++v) layouts.push_back(looped(p, v, m));
      if (most_loops > 1) layouts.push_back(v_shaped(p, m));
      for (const auto& layout : layouts) {
        for (const auto& rule : schedule_rules()) {
          if (!rule.misfit(layout).empty()) continue;
          SCOPED_TRACE(std::string(rule.name) + ", " + std::to_string(p) + " workers, " +
                       std::to_string(layout.stages) + " stages, " + std::to_string(m) + " micro-batches");
          f(std::string(rule.name), layout);
        }
      }
    }
  }
}

}  // namespace gpipe::testing
