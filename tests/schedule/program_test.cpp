#include "gpipe/schedule/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "gpipe/schedule/generators.h"
#include "gpipe/schedule/verifier.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::action;
using ::testing::AllOf;
using testing::chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::layout_of;
using testing::lists;
using ::testing::Not;
using testing::straight;
using testing::with_skips;

/// Expects that the program is refused, with a message that holds every one of the parts.
void refuses(absl::StatusCode code, const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule,
             const std::vector<std::string>& parts) {
  const auto program = Program::make(layout, edges, schedule);
  ASSERT_FALSE(program.ok());
  EXPECT_EQ(program.status().code(), code);
  for (const auto& part : parts) EXPECT_THAT(std::string(program.status().message()), HasSubstr(part));
}

void invalid(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule,
             const std::vector<std::string>& parts) {
  refuses(absl::StatusCode::kInvalidArgument, layout, edges, schedule, parts);
}

void deadlock(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule,
              const std::vector<std::string>& parts) {
  refuses(absl::StatusCode::kFailedPrecondition, layout, edges, schedule, parts);
}

TEST(Action, PrintsStageKindMicroBatch) {
  EXPECT_EQ(to_string({Kind::F, 2, 0}), "2F0");
  EXPECT_EQ(to_string({Kind::R, 0, 12}), "0R12");
  EXPECT_EQ(to_string({Kind::B, 3, 1}), "3B1");
  EXPECT_EQ(to_string({Kind::I, 10, 1}), "10I1");
  EXPECT_EQ(to_string({Kind::W, 0, 0}), "0W0");
}

TEST(CutEdges, JoinsNeighboursAndTheEndsOfLinksThatCross) {
  std::vector<int> crossing;
  const auto edges = cut_edges({2, 1, 3}, {{0, 1, "inside"}, {1, 3, "far"}, {2, 2, "own"}, {0, 2, "near"}}, &crossing);
  ASSERT_EQ(edges.size(), 4U);
  const auto ends = [&](int edge) { return std::pair(edges[edge].from, edges[edge].to); };
  EXPECT_EQ(ends(0), std::pair(0, 1));
  EXPECT_EQ(ends(1), std::pair(1, 2));
  EXPECT_EQ(ends(2), std::pair(0, 2));
  EXPECT_EQ(edges[2].name, "skip far");
  EXPECT_EQ(ends(3), std::pair(0, 1));
  EXPECT_THAT(crossing, ElementsAre(1, 3));
}

TEST(CutEdges, RefusesABalanceThatDoesNotAddUp) {
  constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();
  const auto refused = [](const std::string& why) {
    return ::testing::ThrowsMessage<std::invalid_argument>(HasSubstr(why));
  };
  EXPECT_THAT([] { cut_edges({kHuge, kHuge, 41}, {}); }, refused("sums to more than 2147483647"));
  EXPECT_THAT([] { cut_edges({std::int64_t{1} << 31}, {}); }, refused("{2147483648} sums to more than 2147483647"));
  EXPECT_THAT([] { cut_edges({3, -1}, {}); }, refused("at least one layer, but balance is {3, -1}"));
  EXPECT_EQ(cut_edges({1, (std::int64_t{1} << 31) - 2}, {}).size(), 1U) << "needs no memory for its layers";
  EXPECT_THROW(cut_edges({1, 1}, {{0, 2, "s"}}), std::out_of_range);
  EXPECT_THROW(cut_edges({1, 1}, {{-1, 1, "s"}}), std::out_of_range);
}

TEST(Layout, CountsWorkers) {
  EXPECT_EQ(layout_of({0, 1, 2}, 1).workers(), 3);
  EXPECT_EQ(layout_of({0, 1, 1, 0}, 1).workers(), 2);
  EXPECT_EQ(layout_of({}, 1).workers(), 0);
}

TEST(Wiring, GivesEachActionItsEdges) {
  const Wiring wiring(3, with_skips(chain(3, 1), {{0, 2}}, 1));
  const auto takes = [&](const char* text) {
    const auto edges = wiring.takes(action(text));
    return std::vector<int>(edges.begin(), edges.end());
  };
  const auto puts = [&](const char* text) {
    const auto edges = wiring.puts(action(text));
    return std::vector<int>(edges.begin(), edges.end());
  };
  EXPECT_THAT(takes("0F0"), ElementsAre());
  EXPECT_THAT(puts("0F0"), ElementsAre(0, 2));
  EXPECT_THAT(takes("2F0"), ElementsAre(1, 2));
  EXPECT_THAT(puts("2F0"), ElementsAre());
  for (const char* backward : {"0B0", "0I0"}) {
    EXPECT_THAT(takes(backward), ElementsAre(0, 2));
    EXPECT_THAT(puts(backward), ElementsAre());
  }
  EXPECT_THAT(puts("2I0"), ElementsAre(1, 2));
  for (const char* local : {"1R0", "1W0"}) {
    EXPECT_THAT(takes(local), ElementsAre());
    EXPECT_THAT(puts(local), ElementsAre());
  }
}

TEST(Program, AnswersWhatRuntimesAsk) {
  const auto program = testing::make(straight(3, 2), with_skips(chain(3, 2), {{0, 2}}, 2),
                                     fill_drain(straight(3, 2), Checkpoint::kExceptLast));
  EXPECT_EQ(program.workers(), 3);
  EXPECT_THAT(program.out_edges(0), ElementsAre(0, 2));
  EXPECT_THAT(program.in_edges(0), ElementsAre());
  EXPECT_THAT(program.in_edges(2), ElementsAre(1, 2));
  EXPECT_TRUE(program.has_backward());
  EXPECT_TRUE(program.two_phase());
  for (int s = 0; s < 3; ++s) {
    EXPECT_TRUE(program.recomputes(s, 0));
    EXPECT_FALSE(program.recomputes(s, 1));
    EXPECT_EQ(program.leading_forwards(s), 2);
  }
}

TEST(Program, OfInferenceHasNoBackward) {
  const auto program = testing::make(straight(2, 3), chain(2, 1), fill(straight(2, 3)));
  EXPECT_FALSE(program.has_backward());
  EXPECT_TRUE(program.two_phase());
  EXPECT_EQ(program.leading_forwards(1), 3);
}

TEST(Program, OfOneForwardOneBackwardIsNotInTwoPhases) {
  const auto program = testing::make(straight(2, 3), chain(2, 2), testing::one_forward_one_backward(2, 3));
  EXPECT_FALSE(program.two_phase());
  EXPECT_EQ(program.leading_forwards(0), 2);
  EXPECT_EQ(program.leading_forwards(1), 1);
}

TEST(Verifier, AcceptsWhatGeneratorsMake) {
  for (int stages = 1; stages <= 4; ++stages) {
    for (int m = 1; m <= 5; ++m) {
      const auto layout = straight(stages, m);
      EXPECT_TRUE(verify(layout, chain(stages, 1), fill(layout)).ok());
      for (const auto mode : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
        EXPECT_TRUE(verify(layout, chain(stages, 1), fill_drain(layout, mode)).ok());
      }
    }
  }
}

TEST(Verifier, AcceptsSchedulesThatMixForwardsAndBackwardsWithSkips) {
  for (int stages = 1; stages <= 5; ++stages) {
    const auto edges =
        stages < 3 ? chain(stages, stages) : with_skips(chain(stages, stages), {{0, stages - 1}}, stages);
    for (int m = 1; m <= 8; ++m) {
      for (const auto& schedule : {testing::one_forward_one_backward(stages, m), testing::zero_bubble(stages, m)}) {
        const auto peaks = verify(straight(stages, m), edges, schedule);
        ASSERT_TRUE(peaks.ok()) << peaks.status();
      }
    }
  }
}

TEST(Verifier, BoundsLiveCellsAndGraphs) {
  const auto layout = straight(2, 3);
  const auto never = verify(layout, chain(2, 3), fill_drain(layout, Checkpoint::kNever));
  EXPECT_THAT(never->live, ElementsAre(3, 3));
  EXPECT_THAT(never->graphs, ElementsAre(3, 3));
  const auto except_last = verify(layout, chain(2, 3), fill_drain(layout, Checkpoint::kExceptLast));
  EXPECT_THAT(except_last->live, ElementsAre(3, 3));
  EXPECT_THAT(except_last->graphs, ElementsAre(1, 1));
  const auto always = verify(layout, chain(2, 3), fill_drain(layout, Checkpoint::kAlways));
  EXPECT_THAT(always->graphs, ElementsAre(1, 1));
  const auto inference = verify(layout, chain(2, 3), fill(layout));
  EXPECT_THAT(inference->live, ElementsAre(1, 1));
  EXPECT_THAT(inference->graphs, ElementsAre(0, 0));
  EXPECT_THAT(verify(straight(4, 8), chain(4, 4), testing::one_forward_one_backward(4, 8))->live,
              ElementsAre(4, 3, 2, 1));
  EXPECT_THAT(verify(straight(4, 8), chain(4, 4), testing::zero_bubble(4, 8))->live, ElementsAre(4, 4, 4, 4));
}

TEST(Verifier, RefusesLayouts) {
  const Schedule one = lists({"0F0"});
  invalid({0, 1, {}}, {}, {}, {"0 stages"});
  invalid({1, 0, {0}}, {}, one, {"0 micro-batches"});
  invalid({2, 1, {0}}, {}, one, {"1 stages", "there are 2"});
  invalid({1, 1, {-1}}, {}, one, {"stage 0", "worker -1"});
  invalid({2, 1, {0, 2000000000}}, {}, one, {"stage 1", "worker 2000000000"});
  invalid({3, 1, {0, 2, 2}}, {}, one, {"worker 1 has no stage", "worker 2"});
  invalid({2, 1, {0, 1}}, {}, one, {"1 lists", "2 workers"});
}

TEST(Verifier, RefusesEdges) {
  const auto layout = straight(3, 1);
  const auto schedule = fill(layout);
  invalid(layout, {{1, 1, 1, "loop"}}, schedule, {"edge 0 ('loop')", "stage 1 to stage 1"});
  invalid(layout, {{0, 1, 1, ""}, {2, 1, 1, "back"}}, schedule, {"edge 1 ('back')", "stage 2 to stage 1", "0..2"});
  invalid(layout, {{0, 3, 1, ""}}, schedule, {"edge 0", "stage 0 to stage 3"});
  invalid(layout, {{-1, 2, 1, ""}}, schedule, {"stage -1 to stage 2"});
  invalid(layout, {{0, 2, 0, "skip"}}, schedule, {"edge 0 ('skip')", "capacity 0", "at least 1"});
}

TEST(Verifier, RefusesActionsOutsideTheLayout) {
  invalid(straight(2, 1), chain(2, 1), lists({"0F0 2F0", "1F0"}), {"worker 0 has 2F0", "stage 2", "0..1"});
  invalid(straight(2, 1), chain(2, 1), lists({"0F0", "1F0 1F1"}), {"worker 1 has 1F1", "micro-batch 1", "0..0"});
  invalid(straight(2, 1), chain(2, 1), lists({"-1F0", "1F0"}), {"worker 0 has -1F0"});
  invalid(straight(2, 1), chain(2, 1), lists({"0F-1", "1F0"}), {"worker 0 has 0F-1"});
}

TEST(Verifier, RefusesTheWrongWorker) {
  invalid(straight(2, 1), chain(2, 1), lists({"0F0 1F0", ""}), {"worker 0 has 1F0", "placed on worker 1"});
}

TEST(Verifier, RefusesDuplicates) {
  invalid(straight(1, 1), {}, lists({"0F0 0F0"}), {"0F0 twice"});
  invalid(straight(1, 2), {}, lists({"0F0 0F1 0B1 0B0 0B1"}), {"0B1 twice"});
  invalid(straight(1, 1), {}, lists({"0F0 0R0 0R0 0B0"}), {"0R0 twice"});
  invalid(straight(1, 1), {}, lists({"0F0 0B0 0I0 0W0"}), {"both 0B0 and 0I0"});
  invalid(straight(1, 1), {}, lists({"0F0 0B0 0W0"}), {"both 0B0 and 0W0"});
}

TEST(Verifier, RefusesWhatIsMissing) {
  invalid(straight(2, 2), chain(2, 2), lists({"0F0 0F1", "1F0"}), {"lacks 1F1"});
  invalid(straight(1, 1), {}, lists({""}), {"lacks 0F0"});
  invalid(straight(1, 1), {}, lists({"0B0"}), {"lacks 0F0"});
  invalid(straight(2, 1), chain(2, 1), lists({"0F0", "1F0 1B0"}), {"lacks 0B0"});
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

TEST(Verifier, NamesWhoIsBlockedInADeadlock) {
  deadlock(straight(2, 2), chain(2, 1), lists({"0F0 0F1", "1F1 1F0"}),
           {"worker 0 waits to put edge 0 ('activation 0->1') for 0F1", "capacity of 1",
            "worker 1 waits to take edge 0 ('activation 0->1') for 1F1"});
  EXPECT_TRUE(verify(straight(2, 2), chain(2, 2), lists({"0F0 0F1", "1F1 1F0"})).ok());
}

TEST(Verifier, NamesGradientsAndOnlyTheBlockedWorkers) {
  const auto layout = straight(3, 2);
  const auto schedule = lists({"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"});
  const auto program = Program::make(layout, chain(3, 4), schedule);
  ASSERT_FALSE(program.ok());
  EXPECT_THAT(
      std::string(program.status().message()),
      AllOf(HasSubstr("worker 0 waits to take the gradient of edge 0 ('activation 0->1') for 0B0"),
            HasSubstr("worker 1 waits to take edge 0 ('activation 0->1') for 1F1"),
            HasSubstr("worker 2 waits to take edge 1 ('activation 1->2') for 2F1"), Not(HasSubstr("put edge"))));
}

TEST(Verifier, NeedsRoomForWhatWaitsOnOneWorker) {
  const auto layout = layout_of({0, 0}, 3);
  deadlock(layout, chain(2, 2), fill(layout), {"worker 0 waits to put edge 0 ('activation 0->1') for 0F2"});
  EXPECT_TRUE(verify(layout, chain(2, 3), fill(layout)).ok());
  const auto looped = layout_of({0, 1, 0, 1}, 4);
  deadlock(looped, chain(4, 1), fill_drain(looped, Checkpoint::kNever), {"waits to put edge"});
  EXPECT_TRUE(verify(looped, chain(4, 4), fill_drain(looped, Checkpoint::kNever)).ok());
}

TEST(Verifier, NeedsRoomOnSkips) {
  // Stage 0 must be three forwards ahead before the first backward, and so is the skip.
  const auto schedule = testing::one_forward_one_backward(3, 4);
  EXPECT_TRUE(verify(straight(3, 4), with_skips(chain(3, 1), {{0, 2}}, 1), schedule).ok());
  const auto late = lists({"0F0 0F1 0F2", "1F0 1F1 1F2", "2F2 2F1 2F0"});
  deadlock(straight(3, 3), with_skips(chain(3, 3), {{0, 2}}, 2), late, {"put edge 2 ('skip 0->2') for 0F2"});
  EXPECT_TRUE(verify(straight(3, 3), with_skips(chain(3, 3), {{0, 2}}, 3), late).ok());
}

TEST(Verifier, BoundsGradientsToo) {
  const auto schedule = lists({"0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B2 1B1 1B0"});
  deadlock(straight(2, 3), chain(2, 2), schedule, {"worker 1 waits to put the gradient of edge 0", "for 1B0"});
  EXPECT_TRUE(verify(straight(2, 3), chain(2, 3), schedule).ok());
}

TEST(Verifier, TakesLargePrograms) {
  const auto layout = straight(64, 1024);
  EXPECT_TRUE(verify(layout, chain(64, 1), fill_drain(layout, Checkpoint::kAlways)).ok());
  EXPECT_TRUE(verify(layout, chain(64, 64), testing::zero_bubble(64, 1024)).ok());
}

/// The rules once more, as plainly as can be: workers take turns at single transfers until nobody can do anything.
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
      if (channel.size() == static_cast<std::size_t>(parts.edges[step.edge].capacity)) return false;
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

TEST(Verifier, AgreesWithThePlainRulesOnRandomPrograms) {
  std::mt19937 random(7);
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    const auto parts = testing::random_parts(random);
    const auto peaks = verify(parts.layout, parts.edges, parts.schedule);
    ASSERT_EQ(peaks.ok(), finishes(parts, random))
        << peaks.status() << ::testing::PrintToString(testing::print(parts.schedule));
    ++(peaks.ok() ? accepted : refused);
    EXPECT_TRUE(peaks.ok() || absl::IsFailedPrecondition(peaks.status())) << peaks.status();
  }
  EXPECT_GT(accepted, 500);
  EXPECT_GT(refused, 500);
}

}  // namespace
}  // namespace gpipe
