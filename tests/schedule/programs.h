#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/schedule/program.h"
#include "gpipe/schedules.h"
#include "tests/support/support.h"

namespace gpipe::testing {

/// The inverse of to_string(Action).
inline Action action(const std::string& text) {
  Action result;
  char kind = 0;
  std::istringstream in(text);
  in >> result.stage >> kind >> result.micro_batch;
  for (const Kind it : {Kind::F, Kind::R, Kind::B, Kind::I, Kind::W}) {
    if (in && in.eof() && to_char(it) == kind) {
      result.kind = it;
      return result;
    }
  }
  throw std::invalid_argument("not an action: " + text);
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

/// The inverse of lists().
inline std::vector<std::string> print(const Schedule& schedule) {
  std::vector<std::string> result;
  for (const auto& list : schedule) {
    std::string& line = result.emplace_back();
    for (const Action& it : list) line += (line.empty() ? "" : " ") + to_string(it);
  }
  return result;
}

inline Layout layout_of(std::vector<int> placement, int micro_batches) {
  return {static_cast<int>(placement.size()), micro_batches, std::move(placement)};
}

/// One stage per worker.
inline Layout straight(int stages, int micro_batches) {
  std::vector<int> placement;
  for (int s = 0; s < stages; ++s) placement.push_back(s);
  return layout_of(placement, micro_batches);
}

/// The activations between neighbouring stages.
inline std::vector<Edge> chain(int stages) {
  std::vector<Edge> edges;
  for (int s = 0; s + 1 < stages; ++s) {
    edges.push_back({s, s + 1, "activation " + std::to_string(s) + "->" + std::to_string(s + 1)});
  }
  return edges;
}

inline std::vector<Edge> with_skips(std::vector<Edge> edges, const std::vector<std::pair<int, int>>& skips) {
  for (const auto& [from, to] : skips) {
    edges.push_back({from, to, "skip " + std::to_string(from) + "->" + std::to_string(to)});
  }
  return edges;
}

inline Program make(Layout layout, std::vector<Edge> edges, Schedule schedule) {
  return Program::make(std::move(layout), std::move(edges), std::move(schedule));
}

/// The error of Program::make(); "" if there is none.
inline std::string refusal(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule) {
  return error_of<std::invalid_argument>([&] { Program::make(layout, edges, schedule); });
}

/// The textbook 1F1B schedule with one stage per worker.
inline Schedule one_forward_one_backward(int stages, int micro_batches) {
  Schedule result(stages);
  for (int s = 0; s < stages; ++s) {
    const int warm_up = std::min(micro_batches, stages - s);
    for (int m = 0; m < warm_up; ++m) result[s].push_back({Kind::F, s, m});
    for (int m = 0; m < micro_batches; ++m) {
      result[s].push_back({Kind::B, s, m});
      if (warm_up + m < micro_batches) result[s].push_back({Kind::F, s, warm_up + m});
    }
  }
  return result;
}

/// ZB-H1: 1F1B with each B split into I and W. Worker r delays its W by r micro-batches.
inline Schedule zero_bubble(int stages, int micro_batches) {
  const Schedule whole = one_forward_one_backward(stages, micro_batches);
  Schedule result(stages);
  for (int s = 0; s < stages; ++s) {
    int weights = 0;
    for (const Action& it : whole[s]) {
      if (it.kind == Kind::F) {
        result[s].push_back(it);
        continue;
      }
      result[s].push_back({Kind::I, s, it.micro_batch});
      if (it.micro_batch + 1 - weights > s) result[s].push_back({Kind::W, s, weights++});
    }
    while (weights < micro_batches) result[s].push_back({Kind::W, s, weights++});
  }
  return result;
}

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

  for (int from = 0; from < stages; ++from) {
    for (int to = from + 1; to < stages; ++to) {
      if (to == from + 1 || pick(0, 3) == 0) parts.edges.push_back({from, to, ""});
    }
  }
  std::shuffle(parts.edges.begin(), parts.edges.end(), random);

  // Lists each cell's actions in order, then repeatedly draws a cell and appends its next action. If `data_first`,
  // draws only cells whose next action has its data, so that the schedule runs.
  const bool backward = pick(0, 5) != 0;
  const bool data_first = pick(0, 3) != 0;
  std::vector<std::vector<Action>> cells;
  for (int s = 0; s < stages; ++s) {
    for (int m = 0; m < micro_batches; ++m) {
      auto& cell = cells.emplace_back(1, Action{Kind::F, s, m});
      if (!backward) continue;
      if (pick(0, 1) == 0) cell.push_back({Kind::R, s, m});
      if (pick(0, 1) == 0) {
        cell.push_back({Kind::B, s, m});
      } else {
        cell.push_back({Kind::I, s, m});
        cell.push_back({Kind::W, s, m});
      }
    }
  }
  std::vector<std::size_t> next(cells.size(), 0);
  const auto done = [&](int stage, int m, bool is_backward) {
    const std::size_t c = stage * micro_batches + m;
    for (std::size_t i = 0; i < next[c]; ++i) {
      const Kind kind = cells[c][i].kind;
      if (is_backward ? kind == Kind::B || kind == Kind::I : kind == Kind::F) return true;
    }
    return false;
  };
  const auto ready = [&](const Action& it) {
    return std::all_of(parts.edges.begin(), parts.edges.end(), [&](const Edge& edge) {
      if (it.kind == Kind::F) return edge.to != it.stage || done(edge.from, it.micro_batch, false);
      if (it.kind == Kind::B || it.kind == Kind::I) return edge.from != it.stage || done(edge.to, it.micro_batch, true);
      return true;
    });
  };
  while (true) {
    std::vector<std::size_t> open;
    for (std::size_t c = 0; c < cells.size(); ++c) {
      if (next[c] < cells[c].size() && (!data_first || ready(cells[c][next[c]]))) open.push_back(c);
    }
    if (open.empty()) return parts;
    // Prefers the first open cell, so that the lists resemble real schedules.
    const std::size_t c = open[pick(0, 1) == 0 ? 0 : pick(0, static_cast<int>(open.size()) - 1)];
    const Action it = cells[c][next[c]++];
    parts.schedule[placement[it.stage]].push_back(it);
  }
}

inline const std::vector<int> kMicroBatches = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 23, 32, 40, 64};

inline Layout looped(int workers, int stages_per_worker, int micro_batches) {
  const int stages = workers * stages_per_worker;
  return {stages, micro_batches, looped_placement(workers, stages)};
}

inline Layout v_shaped(int workers, int micro_batches) {
  return {2 * workers, micro_batches, v_placement(2 * workers)};
}

/// Every pair of stages has an edge.
inline std::vector<Edge> all_pairs(int stages) {
  std::vector<Edge> edges;
  for (int from = 0; from < stages; ++from) {
    for (int to = from + 1; to < stages; ++to) edges.push_back({from, to, ""});
  }
  return edges;
}

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
