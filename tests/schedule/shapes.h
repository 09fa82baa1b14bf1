#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "gpipe/schedule/verifier.h"
#include "gpipe/schedules.h"

namespace gpipe::testing {

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
