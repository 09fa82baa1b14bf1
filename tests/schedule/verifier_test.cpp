#include "gpipe/schedule/verifier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/schedules.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using testing::chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::lists;
using ::testing::Not;
using testing::straight;

/// Expects Program::make to refuse the program with a message that contains all `parts`.
void invalid(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule,
             const std::vector<std::string>& parts) {
  const auto error = testing::refusal(layout, edges, schedule);
  EXPECT_THAT(error, AllOf(Not(""), Not(HasSubstr("deadlocks"))));
  for (const auto& part : parts) EXPECT_THAT(error, HasSubstr(part));
}

TEST(Verifier, BoundsLiveCellsAndGraphs) {
  const auto layout = straight(2, 3);
  const auto never = verify(layout, chain(2), fill_drain(layout, Checkpoint::kNever));
  EXPECT_THAT(never.live, ElementsAre(3, 3));
  EXPECT_THAT(never.graphs, ElementsAre(3, 3));
  const auto except_last = verify(layout, chain(2), fill_drain(layout, Checkpoint::kExceptLast));
  EXPECT_THAT(except_last.live, ElementsAre(3, 3));
  EXPECT_THAT(except_last.graphs, ElementsAre(1, 1));
  const auto always = verify(layout, chain(2), fill_drain(layout, Checkpoint::kAlways));
  EXPECT_THAT(always.graphs, ElementsAre(1, 1));
  const auto inference = verify(layout, chain(2), fill(layout));
  EXPECT_THAT(inference.live, ElementsAre(1, 1));
  EXPECT_THAT(inference.graphs, ElementsAre(0, 0));
  EXPECT_THAT(verify(straight(4, 8), chain(4), testing::one_forward_one_backward(4, 8)).live, ElementsAre(4, 3, 2, 1));
  EXPECT_THAT(verify(straight(4, 8), chain(4), testing::zero_bubble(4, 8)).live, ElementsAre(4, 4, 4, 4));
}

TEST(Verifier, RefusesInvalidLayouts) {
  const Schedule one = lists({"0F0"});
  invalid({0, 1, {}}, {}, {}, {"0 stages"});
  invalid({1, 0, {0}}, {}, one, {"0 micro-batches"});
  invalid({2, 1, {0}}, {}, one, {"1 entries", "2 stages"});
  invalid({1, 1, {-1}}, {}, one, {"stage 0", "worker -1"});
  invalid({2, 1, {0, 2000000000}}, {}, one, {"stage 1", "worker 2000000000"});
  invalid({3, 1, {0, 2, 2}}, {}, one, {"worker 1 has no stage", "worker 2"});
  invalid({2, 1, {0, 1}}, {}, one, {"1 lists", "2 workers"});
}

TEST(Verifier, RefusesInvalidEdges) {
  const auto layout = straight(3, 1);
  const auto schedule = fill(layout);
  invalid(layout, {{1, 1, "loop"}}, schedule, {"edge 0 ('loop')", "stage 1 to stage 1"});
  invalid(layout, {{0, 1, ""}, {2, 1, "back"}}, schedule, {"edge 1 ('back')", "stage 2 to stage 1", "0..2"});
  invalid(layout, {{0, 3, ""}}, schedule, {"edge 0", "stage 0 to stage 3"});
  invalid(layout, {{-1, 2, ""}}, schedule, {"stage -1 to stage 2"});
}

TEST(Verifier, RefusesActionsOutsideTheLayout) {
  invalid(straight(2, 1), chain(2), lists({"0F0 2F0", "1F0"}), {"worker 0 has 2F0", "stage 2", "0..1"});
  invalid(straight(2, 1), chain(2), lists({"0F0", "1F0 1F1"}), {"worker 1 has 1F1", "micro-batch 1", "0..0"});
  invalid(straight(2, 1), chain(2), lists({"-1F0", "1F0"}), {"worker 0 has -1F0"});
  invalid(straight(2, 1), chain(2), lists({"0F-1", "1F0"}), {"worker 0 has 0F-1"});
}

TEST(Verifier, RefusesActionsOnTheWrongWorker) {
  invalid(straight(2, 1), chain(2), lists({"0F0 1F0", ""}), {"worker 0 has 1F0", "placed on worker 1"});
}

TEST(Verifier, RefusesRepeatedActions) {
  invalid(straight(1, 1), {}, lists({"0F0 0F0"}), {"0F0 twice"});
  invalid(straight(1, 2), {}, lists({"0F0 0F1 0B1 0B0 0B1"}), {"0B1 twice"});
  invalid(straight(1, 1), {}, lists({"0F0 0R0 0R0 0B0"}), {"0R0 twice"});
  invalid(straight(1, 1), {}, lists({"0F0 0B0 0I0 0W0"}), {"both 0B0 and 0I0"});
  invalid(straight(1, 1), {}, lists({"0F0 0B0 0W0"}), {"both 0B0 and 0W0"});
}

TEST(Verifier, RefusesMissingActions) {
  invalid(straight(2, 2), chain(2), lists({"0F0 0F1", "1F0"}), {"lacks 1F1"});
  invalid(straight(1, 1), {}, lists({""}), {"lacks 0F0"});
  invalid(straight(1, 1), {}, lists({"0B0"}), {"lacks 0F0"});
  invalid(straight(2, 1), chain(2), lists({"0F0", "1F0 1B0"}), {"lacks 0B0"});
  invalid(straight(1, 1), {}, lists({"0F0 0I0"}), {"lacks 0W0", "0I0 needs it"});
  invalid(straight(1, 1), {}, lists({"0F0 0W0"}), {"lacks 0I0", "0W0 needs it"});
  invalid(straight(1, 1), {}, lists({"0F0 0R0"}), {"0R0", "no backward"});
}

TEST(Verifier, RefusesTheWrongOrderWithinACell) {
  invalid(straight(1, 1), {}, lists({"0B0 0F0"}), {"0B0 stands before 0F0"});
  invalid(straight(1, 1), {}, lists({"0R0 0F0 0B0"}), {"0R0 stands before 0F0"});
  invalid(straight(1, 1), {}, lists({"0F0 0B0 0R0"}), {"0B0 stands before 0R0"});
  invalid(straight(1, 1), {}, lists({"0F0 0W0 0I0"}), {"0W0 stands before 0I0"});
  invalid(straight(1, 1), {}, lists({"0F0 0I0 0R0 0W0"}), {"0I0 stands before 0R0"});
}

TEST(Verifier, DeadlockMessageNamesGradientsAndOmitsWorkersThatFinish) {
  const auto layout = straight(3, 2);
  const auto schedule = lists({"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"});
  EXPECT_THAT(testing::refusal(layout, chain(3), schedule),
              AllOf(HasSubstr("worker 0 waits to take the gradient of edge 0 ('activation 0->1') for 0B0"),
                    HasSubstr("worker 1 waits to take edge 0 ('activation 0->1') for 1F1"),
                    HasSubstr("worker 2 waits to take edge 1 ('activation 1->2') for 2F1")));
}

TEST(Verifier, HandlesLargePrograms) {
  const auto layout = straight(64, 1024);
  EXPECT_NO_THROW(verify(layout, chain(64), fill_drain(layout, Checkpoint::kAlways)));
  EXPECT_NO_THROW(verify(layout, chain(64), testing::zero_bubble(64, 1024)));
}

/// A second, simple implementation of rule 4: workers take turns at single transfers until none can go on.
bool finishes(const testing::Parts& parts, std::mt19937& random) {
  struct Step {
    Action action;
    int edge;  // -1: perform
    bool put;
  };
  std::vector<std::vector<Step>> steps;
  for (const auto& list : parts.schedule) {
    auto& mine = steps.emplace_back();
    for (const Action& it : list) {
      const bool forward = it.kind == Kind::F;
      const bool crosses = forward || it.kind == Kind::B || it.kind == Kind::I;
      const auto transfers = [&](bool put) {
        for (int e = 0; crosses && e < static_cast<int>(parts.edges.size()); ++e) {
          const bool leaves = parts.edges[e].from == it.stage;
          const bool enters = parts.edges[e].to == it.stage;
          if (forward == put ? leaves : enters) mine.push_back({it, e, put});
        }
      };
      transfers(false);
      mine.push_back({it, -1, false});
      transfers(true);
    }
  }
  std::map<std::pair<int, bool>, std::set<int>> held;
  std::vector<std::size_t> next(steps.size(), 0);
  const auto can = [&](std::size_t w) {
    if (next[w] == steps[w].size()) return false;
    const Step& step = steps[w][next[w]];
    if (step.edge < 0) return true;
    auto& channel = held[{step.edge, step.action.kind == Kind::F}];
    if (step.put) {
      return channel.insert(step.action.micro_batch).second;
    }
    return channel.erase(step.action.micro_batch) == 1;
  };
  std::vector<std::size_t> order;
  for (std::size_t w = 0; w < steps.size(); ++w) order.push_back(w);
  for (bool moved = true; moved;) {
    moved = false;
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t w : order) {
      if (!can(w)) continue;
      ++next[w];
      moved = true;
    }
  }
  for (std::size_t w = 0; w < steps.size(); ++w) {
    if (next[w] != steps[w].size()) return false;
  }
  return true;
}

TEST(Verifier, AgreesWithASimpleImplementationOnRandomPrograms) {
  std::mt19937 random(7);
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 3500; ++i) {
    const auto parts = testing::random_parts(random);
    const auto error = testing::refusal(parts.layout, parts.edges, parts.schedule);
    ASSERT_EQ(error.empty(), finishes(parts, random))
        << error << ::testing::PrintToString(testing::print(parts.schedule));
    ++(error.empty() ? accepted : refused);
    EXPECT_THAT(error, AnyOf("", HasSubstr("the schedule deadlocks")));
  }
  EXPECT_GT(accepted, 500);
  EXPECT_GT(refused, 500);
}

}  // namespace
}  // namespace gpipe
