// The choice of "auto" against all named schedules, simulated with the costs that it should have measured.
#include "gpipe/schedule/auto_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpipe/schedules.h"
#include "gpipe/simulator.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::chain;
using testing::looped;

/// Each stage takes longer than the one before by `growth`.
Costs costs(const Layout& layout, double growth) {
  Costs costs;
  for (int s = 0; s < layout.stages; ++s) {
    const double size = 1 + growth * s;
    costs.actions.push_back({size, size, 1.9 * size, 1.1 * size, 0.9 * size});
    costs.stored.push_back(0.9 * size);
  }
  costs.edges.assign(layout.stages - 1, 0);
  return costs;
}

Simulation simulated(const Layout& layout, Schedule schedule, double growth) {
  return simulate(Program::make(layout, chain(layout.stages), std::move(schedule)), costs(layout, growth));
}

std::string chosen(const Layout& layout, Checkpoint checkpoint, double growth = 0, bool saves_memory = false) {
  const auto measured = simulated(layout, measuring_schedule(layout, checkpoint), growth).timeline;
  return fastest_schedule(measured, layout, checkpoint, /*last_is_smaller=*/false, saves_memory);
}

TEST(AutoSchedule, IsWithinOnePercentOfTheFastest) {
  constexpr double kGrowth = 0.1;
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    for (const int workers : {1, 2, 4}) {
      for (const int micro_batches : {2, 3, 8}) {
        for (const bool v : {false, true}) {
          Layout layout = looped(workers, v ? 2 : 1, micro_batches);
          if (v) layout.placement = v_placement(layout.stages);
          const auto seconds_of = [&](std::string_view name) {
            return simulated(layout, make_schedule(name, layout, checkpoint), kGrowth).makespan;
          };
          const auto name = chosen(layout, checkpoint, kGrowth);
          for (const auto& rule : schedule_rules()) {
            if (!rule.misfit(layout).empty() || rule.name == "gpipe" || rule.name == "looped_bfs") continue;
            EXPECT_LE(seconds_of(name), seconds_of(rule.name) * 1.01)
                << name << " instead of " << rule.name << ", " << workers << " workers, " << micro_batches
                << " micro-batches";
          }
        }
      }
    }
  }
}

TEST(AutoSchedule, SavesMemory) {
  const auto layout = looped(4, 1, 8);
  EXPECT_EQ(chosen(layout, Checkpoint::kNever), "zb_h2");
  EXPECT_EQ(chosen(layout, Checkpoint::kNever, /*growth=*/0, /*saves_memory=*/true), "zb_h1");
  EXPECT_EQ(chosen(looped(1, 1, 8), Checkpoint::kNever), "1f1b") << "equally fast, with the fewest cells";
}

TEST(AutoSchedule, SavesMemoryAlsoWithMoreMicroBatches) {
  EXPECT_EQ(chosen(looped(4, 1, 3), Checkpoint::kNever, /*growth=*/0, /*saves_memory=*/true), "zb_h1");
  EXPECT_EQ(chosen(looped(4, 1, 8), Checkpoint::kAlways, /*growth=*/0, /*saves_memory=*/true), "1f1b")
      << "zb_h1 holds more graphs";
}

TEST(AutoSchedule, IgnoresASmallerLastMicroBatch) {
  const auto layout = looped(2, 1, 4);
  auto measured = simulated(layout, measuring_schedule(layout, Checkpoint::kNever), /*growth=*/0).timeline;
  const auto name = fastest_schedule(measured, layout, Checkpoint::kNever, /*last_is_smaller=*/false, false);
  for (auto& span : measured.spans) {
    if (span.action.micro_batch == 3) span.end = span.start + 0.01;
  }
  EXPECT_NE(name, "1f1b");
  EXPECT_EQ(fastest_schedule(measured, layout, Checkpoint::kNever, /*last_is_smaller=*/true, false), name);
}

TEST(AutoSchedule, HasTheOrderOfSumsOf1f1b) {
  for (const auto& rule : schedule_rules()) {
    if (fills_and_drains(rule.name)) continue;
    for (int stages : {2, 4}) {
      for (const auto& placement : {looped_placement(2, stages), v_placement(stages)}) {
        const Layout layout{stages, 7, placement};
        if (!rule.misfit(layout).empty()) continue;
        for (const auto& list : make_schedule(rule.name, layout, Checkpoint::kNever)) {
          std::map<int, int> next;  // micro-batch, by stage
          for (const auto& [kind, stage, micro_batch] : list) {
            const bool sums = kind == Kind::B || kind == Kind::W;
            if (sums) EXPECT_EQ(micro_batch, next[stage]++) << rule.name;
          }
        }
      }
    }
  }
}

TEST(AutoSchedule, OfOneMicroBatchIsKnownFromWholeBackwards) {
  EXPECT_EQ(chosen(looped(2, 1, 1), Checkpoint::kNever), "1f1b");
}

}  // namespace
}  // namespace gpipe
