#include "gpipe/ranks/wire_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "tests/schedule/programs.h"
#include "tests/schedule/shapes.h"

namespace gpipe {
namespace {

TEST(RanksOfWorkers, AreContiguousBlocksAsEqualAsPossible) {
  for (int workers = 1; workers <= 12; ++workers) {
    for (int ranks = 1; ranks <= workers; ++ranks) {
      const auto of_workers = ranks_of_workers(workers, ranks);
      ASSERT_EQ(of_workers.size(), workers);
      EXPECT_TRUE(std::is_sorted(of_workers.begin(), of_workers.end()));
      for (int r = 0; r < ranks; ++r) {
        const auto count = std::count(of_workers.begin(), of_workers.end(), r);
        EXPECT_TRUE(count == workers / ranks || count == (workers + ranks - 1) / ranks) << count;
      }
    }
  }
}

/// A worker's action by its place in the worker's list, with the edges that it puts for another worker.
using Messages = std::map<std::size_t, std::pair<Action, std::vector<int>>>;
using ExpectedWires = std::map<std::pair<int, int>, Messages>;

/// What each edge carries for each micro-batch, sorted by the workers at its ends.
ExpectedWires wires_of(const Program& program, Part part, const std::vector<int>& ranks) {
  const auto& placement = program.layout().placement;
  ExpectedWires wires;
  for (int from = 0; from < program.workers(); ++from) {
    const auto& list = program.schedule()[from];
    for (std::size_t i = 0; i < list.size(); ++i) {
      const auto& action = list[i];
      const bool forward = action.kind == Kind::F;
      if (part == Part::kForward && !forward) continue;
      if (part == Part::kBackward && forward) continue;
      if (action.kind == Kind::R || action.kind == Kind::W) continue;
      for (int e = 0; e < static_cast<int>(program.edges().size()); ++e) {
        const auto& edge = program.edges()[e];
        if ((forward ? edge.from : edge.to) != action.stage) continue;
        const int to = placement[forward ? edge.to : edge.from];
        if (ranks[to] == ranks[from]) continue;
        auto& message = wires[{from, to}][i];
        message.first = action;
        message.second.push_back(e);
      }
    }
  }
  return wires;
}

void expect_plan(const Program& program, Part part, const std::vector<int>& ranks) {
  const auto expected = wires_of(program, part, ranks);
  const auto plans = plan_wires(program, part, ranks);
  ASSERT_EQ(plans.size(), expected.size());
  std::set<std::tuple<int, int, std::uint64_t>> labels;
  auto wire = expected.begin();
  for (const auto& plan : plans) {
    ASSERT_EQ(std::pair(plan.from, plan.to), wire->first);
    ASSERT_EQ(plan.messages.size(), wire->second.size());
    auto message = wire->second.begin();
    for (const auto& planned : plan.messages) {
      EXPECT_EQ(planned.action, message->second.first);
      EXPECT_EQ(planned.edges, message->second.second);
      EXPECT_TRUE(labels.emplace(plan.from, plan.to, planned.label()).second) << "two messages with one label";
      ++message;
    }
    ++wire;
  }
}

TEST(PlanWires, HasWhatCrossesRanksInTheSendersOrder) {
  testing::for_each_shape(4, 2, {1, 4, 8}, [](const std::string& name, const Layout& layout) {
    auto edges = layout.stages <= 4 ? testing::all_pairs(layout.stages)
                                    : testing::with_skips(testing::chain(layout.stages, 1),
                                                          {{0, layout.stages - 1}, {0, 2}, {1, 2}}, 1);
    const auto schedule = make_schedule(name, layout, Checkpoint::kExceptLast);
    edges = testing::with_sufficient_capacities(std::move(edges), layout, schedule);
    const auto program = testing::make(layout, std::move(edges), schedule);
    for (int ranks = 1; ranks <= program.workers(); ++ranks) {
      const auto of_workers = ranks_of_workers(program.workers(), ranks);
      expect_plan(program, Part::kAll, of_workers);
      if (!program.two_phase()) continue;
      expect_plan(program, Part::kForward, of_workers);
      expect_plan(program, Part::kBackward, of_workers);
    }
  });
}

TEST(PlanWires, JoinsTheEdgesOfAnAction) {
  const auto program =
      testing::make(testing::straight(3, 1), testing::with_skips(testing::chain(3, 1), {{0, 2}, {0, 1}}, 1),
                    testing::lists({"0F0 0B0", "1F0 1B0", "2F0 2B0"}));
  const auto plans = plan_wires(program, Part::kForward, {0, 1, 1});
  ASSERT_EQ(plans.size(), 2);
  EXPECT_EQ(plans[0].to, 1);
  ASSERT_EQ(plans[0].messages.size(), 1);
  EXPECT_EQ(plans[0].messages[0].edges, (std::vector{0, 3}));
  EXPECT_EQ(plans[1].to, 2);
  ASSERT_EQ(plans[1].messages.size(), 1);
  EXPECT_EQ(plans[1].messages[0].edges, std::vector{2});
}

}  // namespace
}  // namespace gpipe
