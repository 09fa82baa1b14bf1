#include "gpipe/schedule/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>

#include "gpipe/schedule/generators.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::action;
using testing::chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::layout_of;
using testing::straight;
using testing::with_skips;

TEST(Action, PrintsStageKindMicroBatch) {
  EXPECT_EQ(to_string({Kind::F, 2, 0}), "2F0");
  EXPECT_EQ(to_string({Kind::R, 0, 12}), "0R12");
  EXPECT_EQ(to_string({Kind::B, 3, 1}), "3B1");
  EXPECT_EQ(to_string({Kind::I, 10, 1}), "10I1");
  EXPECT_EQ(to_string({Kind::W, 0, 0}), "0W0");
}

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

TEST(Program, KnowsItsEdgesAndPhases) {
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
    EXPECT_EQ(program.actions(s, Part::kForward).size(), 2u);
  }
}

TEST(Program, InferenceHasNoBackward) {
  const auto program = testing::make(straight(2, 3), chain(2, 1), fill(straight(2, 3)));
  EXPECT_FALSE(program.has_backward());
  EXPECT_TRUE(program.two_phase());
  EXPECT_EQ(program.actions(1, Part::kForward).size(), 3u);
}

TEST(Program, OneForwardOneBackwardIsNotTwoPhase) {
  const auto program = testing::make(straight(2, 3), chain(2, 2), testing::one_forward_one_backward(2, 3));
  EXPECT_FALSE(program.two_phase());
  EXPECT_EQ(program.actions(0, Part::kForward).size(), 2u);
  EXPECT_EQ(program.actions(1, Part::kForward).size(), 1u);
}

}  // namespace
}  // namespace gpipe
