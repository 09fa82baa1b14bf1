// Programs: actions, edges, the lists of gpipe, and their text.
#include "gpipe/schedule/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/schedule/schedule_source.h"
#include "gpipe/schedules.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::action;
using testing::chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::layout_of;
using testing::print;
using testing::straight;
using ::testing::ThrowsMessage;
using testing::with_skips;

TEST(CutEdges, ActivationsComeBeforeLinksThatCrossACut) {
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

TEST(CutEdges, RefusesInvalidBalancesAndLayers) {
  constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();
  const auto refused = [](const std::string& why) {
    return ::testing::ThrowsMessage<std::invalid_argument>(HasSubstr(why));
  };
  EXPECT_THAT([] { cut_edges({kHuge, kHuge, 41}, {}); }, refused("sums to more than 2147483647"));
  EXPECT_THAT([] { cut_edges({std::int64_t{1} << 31}, {}); }, refused("[2147483648] sums to more than 2147483647"));
  EXPECT_THAT([] { cut_edges({3, -1}, {}); }, refused("balance is [3, -1], but every stage needs at least one layer"));
  EXPECT_EQ(cut_edges({1, (std::int64_t{1} << 31) - 2}, {}).size(), 1U) << "needs no memory for its layers";
  EXPECT_THROW(cut_edges({1, 1}, {{0, 2, "s"}}), std::out_of_range);
  EXPECT_THROW(cut_edges({1, 1}, {{-1, 1, "s"}}), std::out_of_range);
}

TEST(Wiring, GivesEachActionItsEdges) {
  const Wiring wiring(3, with_skips(chain(3), {{0, 2}}));
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

TEST(Program, KnowsItsEdgesAndPhases) {
  const auto program = testing::make(straight(3, 2), with_skips(chain(3), {{0, 2}}),
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
    EXPECT_EQ(program.actions(s, Part::kForward).size(), 2u);
  }
}

TEST(Program, MayHaveNoBackwardOrMixItWithForwards) {
  const auto inference = testing::make(straight(2, 3), chain(2), fill(straight(2, 3)));
  EXPECT_FALSE(inference.has_backward());
  EXPECT_TRUE(inference.two_phase());
  EXPECT_EQ(inference.actions(1, Part::kForward).size(), 3u);
  const auto program = testing::make(straight(2, 3), chain(2), testing::one_forward_one_backward(2, 3));
  EXPECT_FALSE(program.two_phase());
  EXPECT_EQ(program.actions(0, Part::kForward).size(), 2u);
  EXPECT_EQ(program.actions(1, Part::kForward).size(), 1u);
}

TEST(Fill, RunsTheStagesOfAWorkerInOrder) {
  EXPECT_THAT(print(fill(straight(2, 3))), ElementsAre("0F0 0F1 0F2", "1F0 1F1 1F2"));
  EXPECT_THAT(print(fill(layout_of({0, 1, 0}, 2))), ElementsAre("0F0 0F1 2F0 2F1", "1F0 1F1"));
}

TEST(FillDrain, RecomputesAsTheModeSaysAndDrainsInReverse) {
  struct Case {
    Layout layout;
    Checkpoint checkpoint;
    std::vector<std::string> lists;
  };
  const std::vector<Case> cases = {
      {straight(2, 2), Checkpoint::kNever, {"0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"}},
      {straight(2, 3), Checkpoint::kExceptLast, {"0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0", "1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0"}},
      {straight(1, 1), Checkpoint::kExceptLast, {"0F0 0B0"}},
      {straight(2, 2), Checkpoint::kAlways, {"0F0 0F1 0R1 0B1 0R0 0B0", "1F0 1F1 1R1 1B1 1R0 1B0"}},
      {straight(1, 1), Checkpoint::kAlways, {"0F0 0R0 0B0"}},
      {layout_of({0, 1, 1, 0}, 2),
       Checkpoint::kExceptLast,
       {"0F0 0F1 3F0 3F1 3B1 3R0 3B0 0B1 0R0 0B0", "1F0 1F1 2F0 2F1 2B1 2R0 2B0 1B1 1R0 1B0"}}};
  for (const auto& [layout, checkpoint, lists] : cases) EXPECT_EQ(print(fill_drain(layout, checkpoint)), lists);
}

TEST(Generators, RefuseTooManyCellsAndInvalidLayouts) {
  constexpr int kMost = std::numeric_limits<int>::max();
  // In int arithmetic 65536 x 65536 would be 0, and 65537 x 65536 would be 65536.
  for (const auto& [stages, micro_batches] :
       {std::pair(2, kMost), std::pair(kMost, 2), std::pair(1 << 16, 1 << 16), std::pair((1 << 16) + 1, 1 << 16)}) {
    const auto make = [stages = stages, micro_batches = micro_batches] {
      Program::make({stages, micro_batches, {}}, {}, {});
    };
    EXPECT_THAT(make, ThrowsMessage<std::invalid_argument>(HasSubstr("at most 4194304 cells"))) << stages;
  }
  EXPECT_THROW(fill(layout_of({0, 2}, 1)), std::invalid_argument);
  EXPECT_THROW(fill(layout_of({0, -1}, 1)), std::invalid_argument);
  EXPECT_THROW(fill_drain(straight(2, 0), Checkpoint::kNever), std::invalid_argument);
  EXPECT_THROW(fill(straight(2, kMost)), std::invalid_argument);
  EXPECT_THROW(fill_drain(straight(2, kMost), Checkpoint::kNever), std::invalid_argument);
  EXPECT_THAT([] { Program::make({-1, 1, {}}, {}, {}); }, ThrowsMessage<std::invalid_argument>(HasSubstr("-1 stages")));
}

TEST(ScheduleText, ParsesWhatItPrints) {
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    const auto parts = testing::random_parts(random);
    const auto parsed = parse_schedule(to_text(parts.schedule));
    EXPECT_EQ(parsed.schedule, parts.schedule);
    EXPECT_EQ(parsed.layout.placement, parts.layout.placement);
    EXPECT_EQ(parsed.layout.micro_batches, parts.layout.micro_batches);
  }
}

TEST(ScheduleText, AcceptsCommasCommentsAndEmptyLines) {
  const auto parsed = parse_schedule("# one micro-batch\n\n0F0,,1F0, 1B0\t0B0  # worker 0\r\n  2F0 2I0 2W0\n");
  EXPECT_EQ(to_text(parsed.schedule), "0F0 1F0 1B0 0B0\n2F0 2I0 2W0\n");
  EXPECT_EQ(parsed.layout.placement, (std::vector<int>{0, 0, 1}));
  EXPECT_EQ(parsed.layout.stages, 3);
  EXPECT_EQ(parsed.layout.micro_batches, 1);
}

TEST(ScheduleText, NamesLineColumnAndReason) {
  const auto error = [](const char* text) { return error_of<std::invalid_argument>([&] { parse_schedule(text); }); };
  EXPECT_THAT(error("0F0 0X0\n"), HasSubstr("line 1, column 5: '0X0' is not an action"));
  EXPECT_THAT(error("0F0 0B0\n\n 1F0 1B\n"), HasSubstr("line 3, column 6: '1B' is not an action"));
  EXPECT_THAT(error("0F0 0B0 -1F0"), HasSubstr("line 1, column 9"));
  EXPECT_THAT(error("0F99999999999"), HasSubstr("line 1, column 1"));
  EXPECT_THAT(error("0F4194304"), HasSubstr("line 1, column 1"));
  EXPECT_THAT(error("0F0 0B0\n1F0 0F1"), HasSubstr("line 2, column 5: stage 0 is on worker 0 already"));
  EXPECT_THAT(error("0F0 0B0\n2F0 2B0"), HasSubstr("stage 1 has no action, but stage 2 has"));
  EXPECT_THAT(error(""), HasSubstr("the schedule is empty"));
  EXPECT_THAT(error(" , \n# nothing\n"), HasSubstr("the schedule is empty"));
}

}  // namespace
}  // namespace gpipe
