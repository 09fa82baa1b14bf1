#pragma once

#include <array>
#include <initializer_list>
#include <random>
#include <set>
#include <sstream>
#include <utility>

#include "gpipe/program.h"
#include "gpipe/schedules.h"
#include "gpipe/simulator.h"
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

/// The seconds of F, R, B, I and W.
using Times = std::array<double, 5>;

/// Simulates a schedule on a model without skips, with the times of each stage. Transfers take `transfer` seconds.
inline Simulation simulated(const Layout& layout, Schedule schedule, std::vector<Times> actions, double transfer = 0) {
  return simulate(plain_program(layout, std::move(schedule)),
                  {.actions = std::move(actions), .edges = std::vector(layout.stages - 1, transfer)});
}
/// With the same times for every stage.
inline Simulation simulated(const Layout& layout, Schedule schedule, const Times& times = {1, 0, 2, 1, 1}) {
  return simulated(layout, std::move(schedule), std::vector(layout.stages, times));
}

/// The error of Program::make(); "" if there is none.
inline std::string refusal(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule) {
  return error_of<std::invalid_argument>([&] { Program::make(layout, edges, schedule); });
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
