#include "gpipe/schedules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "gpipe/schedule/schedule_source.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/simulator.h"
#include "tests/schedule/programs.h"
#include "tests/schedule/shapes.h"

namespace gpipe {
namespace {

using testing::all_pairs;
using testing::for_each_shape;
using ::testing::HasSubstr;
using testing::kMicroBatches;
using testing::looped;
using ::testing::ThrowsMessage;
using testing::with_sufficient_capacities;

// Makespan without the work of a device, in units of F, where B takes twice as long as F.
double expected_overhead(const std::string& name, int p, int v, int m) {
  const double cell = 3;
  const double extra = v > 1 && m < p ? (v - 1) * (p - m) * cell : 0;
  return (p - 1) * cell + (name == "1f1b" ? 0 : extra);
}

int expected_peak(const std::string& name, int p, int v, int m, int worker) {
  if (name == "1f1b") return std::min(m, p - worker);
  if (name == "interleaved_1f1b") {
    const int rounds = std::max(1, m / p);
    const int largest = m / rounds + (m % rounds != 0 ? 1 : 0);
    return std::min(v * m, (v - 1) * largest + 2 * (p - 1 - worker) + 1);
  }
  return v * m;
}

TEST(Schedules, TakeTheTimeAndTheCellsOfTheirFormulas) {
  for_each_shape(8, 3, kMicroBatches, [](const std::string& name, const Layout& layout) {
    const bool is_looped = layout.placement == looped_placement(layout.workers(), layout.stages);
    const std::set<std::string> names = {"gpipe", "1f1b", "looped_bfs", "interleaved_1f1b"};
    if (!is_looped || !names.contains(name)) return;  // for the others, see zero_bubble_test.cpp
    const int p = layout.workers();
    const int v = layout.stages / p;
    const int m = layout.micro_batches;
    const auto schedule = make_schedule(name, layout, Checkpoint::kNever);
    const auto edges = with_sufficient_capacities(testing::chain(layout.stages, 1), layout, schedule);
    Costs costs{.actions = {static_cast<std::size_t>(layout.stages), {1, 0, 2, 0, 0}},
                .edges = std::vector<double>(edges.size())};
    const auto simulation = simulate(testing::make(layout, edges, schedule), costs);
    EXPECT_DOUBLE_EQ(simulation.makespan - 3.0 * m * v, expected_overhead(name, p, v, m));
    for (int worker = 0; worker < p; ++worker) {
      EXPECT_EQ(simulation.peak_cells[worker], expected_peak(name, p, v, m, worker)) << "worker " << worker;
    }
  });
}

// The forwards of a stage run in ascending order, and so do its backwards except in gpipe and looped_bfs: sums have one
// order. In split backwards, neither part changes it.
TEST(Schedules, SumInOneOrder) {
  for_each_shape(8, 3, {1, 2, 3, 5, 8, 13, 40}, [](const std::string& name, const Layout& layout) {
    const bool descending = name == "gpipe" || name == "looped_bfs";
    const int first = descending ? layout.micro_batches - 1 : 0;
    const int step = descending ? -1 : 1;
    for (const auto& list : make_schedule(name, layout, Checkpoint::kNever)) {
      std::vector<int> forward(layout.stages);
      std::vector<int> inputs(layout.stages, first);
      std::vector<int> weights(layout.stages, first);
      for (const auto& [kind, stage, m] : list) {
        if (kind == Kind::F) {
          EXPECT_EQ(m, forward[stage]++);
        }
        if (kind == Kind::B || kind == Kind::I) {
          EXPECT_EQ(m, inputs[stage]);
          inputs[stage] += step;
        }
        if (kind == Kind::B || kind == Kind::W) {
          EXPECT_EQ(m, weights[stage]);
          weights[stage] += step;
        }
      }
    }
  });
}

TEST(Schedules, RecomputeDirectlyBeforeTheBackward) {
  for_each_shape(4, 2, {1, 3, 6}, [](const std::string& name, const Layout& layout) {
    const auto program = testing::make(layout, {}, make_schedule(name, layout, Checkpoint::kExceptLast));
    for (const auto& list : program.schedule()) {
      for (std::size_t i = 0; i < list.size(); ++i) {
        if (list[i].kind != Kind::R) continue;
        const auto [kind, stage, m] = list[i + 1];
        EXPECT_TRUE(kind == Kind::B || kind == Kind::I);
        EXPECT_EQ((Action{Kind::R, stage, m}), list[i]);
      }
    }
    for (int stage = 0; stage < layout.stages; ++stage) {
      for (int m = 0; m < layout.micro_batches; ++m) {
        EXPECT_EQ(program.recomputes(stage, m), m + 1 < layout.micro_batches);
      }
    }
  });
}

TEST(Schedules, RunWithASkipBetweenAnyTwoStages) {
  for_each_shape(8, 3, {1, 2, 3, 5, 8, 13, 40}, [](const std::string& name, const Layout& layout) {
    const auto schedule = make_schedule(name, layout, Checkpoint::kNever);
    const auto edges = with_sufficient_capacities(all_pairs(layout.stages), layout, schedule);
    EXPECT_NO_THROW(verify(layout, edges, schedule));
  });
}

TEST(Capacities, TheLeastSufficesAndOneLessDeadlocks) {
  int narrower = 0;
  for_each_shape(4, 2, {1, 2, 4, 7}, [&](const std::string& name, const Layout& layout) {
    const auto schedule = make_schedule(name, layout, Checkpoint::kNever);
    const auto edges = with_sufficient_capacities(all_pairs(layout.stages), layout, schedule);
    const auto least = least_capacities(layout, edges, schedule);
    for (std::size_t e = 0; e < edges.size(); ++e) {
      auto narrow = edges;
      narrow[e].capacity = least[e];
      EXPECT_NO_THROW(verify(layout, narrow, schedule));
      if (least[e] < edges[e].capacity) ++narrower;
      if (--narrow[e].capacity > 0) {
        EXPECT_THAT(testing::refusal(layout, narrow, schedule), HasSubstr("deadlocks"));
      }
    }
  });
  EXPECT_GT(narrower, 0);
}

TEST(Capacities, HoldEveryMicroBatchOfAnInference) {
  const auto layout = looped(2, 2, 5);
  EXPECT_EQ(sufficient_capacities(layout, testing::chain(4, 1), fill(layout)), std::vector<int>(3, 5));
}

TEST(Schedules, OneForwardOneBackward) {
  EXPECT_EQ(to_text(make_schedule("1f1b", looped(3, 1, 4), Checkpoint::kNever)),
            "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n");
}

// The lists that PyTorch 2.11's ScheduleInterleaved1F1B makes.
TEST(Schedules, Interleaved) {
  EXPECT_EQ(to_text(make_schedule("interleaved_1f1b", looped(2, 2, 4), Checkpoint::kNever)),
            "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3\n");
}

TEST(Schedules, RefuseWhatDoesNotFit) {
  const auto make = [](const char* name, const Layout& layout) {
    return [=] { make_schedule(name, layout, Checkpoint::kNever); };
  };
  EXPECT_THAT(make("1f1f", looped(2, 1, 2)),
              ThrowsMessage<std::invalid_argument>(
                  HasSubstr("unknown schedule '1f1f'; choose one of gpipe, 1f1b, looped_bfs, interleaved_1f1b")));
  EXPECT_THAT(make("1f1b", looped(2, 2, 2)),
              ThrowsMessage<std::invalid_argument>(HasSubstr(
                  "schedule '1f1b' needs stage s on worker s, one stage per worker, but the layout has 4 stages "
                  "on workers 0, 1, 0, 1")));
  EXPECT_THAT(make("interleaved_1f1b", {4, 2, {0, 1, 1, 0}}),
              ThrowsMessage<std::invalid_argument>(HasSubstr("needs stage s on worker s mod the number of workers")));
  EXPECT_THAT(make("looped_bfs", {3, 2, {0, 1, 0}}),
              ThrowsMessage<std::invalid_argument>(HasSubstr("the same number of stages")));
  for (const auto& name : {"zb_v", "v_half", "v_min", "dualpipe_v"}) {
    EXPECT_THAT(make(name, looped(2, 2, 2)),
                ThrowsMessage<std::invalid_argument>(HasSubstr("needs stages s and 2p - 1 - s on worker s of p")));
    EXPECT_THAT(make(name, {3, 2, {0, 1, 0}}),
                ThrowsMessage<std::invalid_argument>(HasSubstr("but the layout has 3 stages on workers 0, 1, 0")));
  }
  EXPECT_THAT(make("zb_h2", looped(2, 2, 2)),
              ThrowsMessage<std::invalid_argument>(HasSubstr("needs stage s on worker s, one stage per worker")));
  EXPECT_THAT(make("interleaved_zb", testing::v_shaped(2, 2)),
              ThrowsMessage<std::invalid_argument>(HasSubstr("needs stage s on worker s mod the number of workers")));
  EXPECT_THROW(make("gpipe", {2, 0, {0, 1}})(), std::invalid_argument);
  EXPECT_THROW(looped_placement(0, 2), std::invalid_argument);
  EXPECT_THROW(v_placement(3), std::invalid_argument);
}

TEST(Placement, VSharesTheFirstWorkerWithTheLastStage) {
  EXPECT_EQ(v_placement(6), (std::vector<int>{0, 1, 2, 2, 1, 0}));
  EXPECT_EQ(v_placement(2), (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace gpipe
