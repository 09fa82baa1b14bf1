#include "gpipe/schedule/footprint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "gpipe/schedule/generators.h"
#include "gpipe/schedule/simulator.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::straight;

/// Decimal digits tell what is counted: forward 1,000, stored 100, recomputed 900, sent 10, parameters 1.
CellBytes cells() {
  return {.forward = {1005, 1000},
          .stored = {305, 100},
          .recompute = {905, 900},
          .backward = {40, 10},
          .handed_over = 0,
          .parameters = 1};
}

Simulation run(int stages, int micro_batches, Checkpoint checkpoint, std::vector<CellBytes> bytes) {
  const auto layout = straight(stages, micro_batches);
  const auto program = testing::make(layout, chain(stages, micro_batches), fill_drain(layout, checkpoint));
  return simulate(program, {std::vector<std::array<double, 5>>(stages, {1, 1, 2, 0, 0}),
                            std::vector<double>(program.edges().size(), 0.0), std::move(bytes)});
}

std::string print(const Timeline& timeline) {
  std::string text;
  for (const Span& span : timeline.spans) {
    text += to_string(span.action) + " " + std::to_string(span.bytes.before) + " " + std::to_string(span.bytes.peak) +
            " " + std::to_string(span.bytes.after) + "; ";
  }
  return text;
}

TEST(Footprint, StoredGraphsPileUpUntilTheDrain) {
  const auto simulation = run(2, 2, Checkpoint::kNever, {cells(), cells()});
  EXPECT_EQ(print(simulation.timeline),
            "0F0 0 1005 1000; 0F1 1000 2005 2000; 0B1 2000 2040 1011; 0B0 1011 1051 21; "
            "1F0 0 1005 1000; 1F1 1000 2005 2000; 1B1 2000 2040 1011; 1B0 1011 1051 11; ");
  EXPECT_THAT(simulation.timeline.peak_bytes(), ElementsAre(2040, 2040));
}

TEST(Footprint, ARecomputedCellHoldsItsGraphFromItsRecomputeOn) {
  const auto simulation = run(2, 2, Checkpoint::kAlways, {cells(), cells()});
  EXPECT_EQ(
      print(simulation.timeline),
      "0F0 0 305 100; 0F1 100 405 200; 0R1 200 1105 1100; 0B1 1100 1140 111; 0R0 111 1016 1011; 0B0 1011 1051 21; "
      "1F0 0 305 100; 1F1 100 405 200; 1R1 200 1105 1100; 1B1 1100 1140 111; 1R0 111 1016 1011; 1B0 1011 1051 11; ");
}

TEST(Footprint, TheLastStageHandsItsOutputsOverWhenAllForwardsHaveRun) {
  auto last = cells();
  last.handed_over = 400;
  const auto simulation = run(2, 2, Checkpoint::kNever, {cells(), last});
  EXPECT_EQ(print(simulation.timeline).substr(print(simulation.timeline).find("1F0")),
            "1F0 0 1005 1000; 1F1 1000 2005 2000; 1B1 1200 1240 611; 1B0 611 651 11; ");
}

TEST(Footprint, GradientsWaitForASlowReceiver) {
  const auto layout = straight(2, 3);
  const auto program = testing::make(layout, chain(2, 3), fill_drain(layout, Checkpoint::kNever));
  const auto simulation = simulate(program, {{{{1, 0, 100, 0, 0}}, {{1, 0, 1, 0, 0}}}, {0}, {cells(), cells()}});
  EXPECT_EQ(simulation.timeline.spans.back().bytes.after, 31);
}

TEST(Footprint, StepsAreAccountedForThemselves) {
  auto timeline = run(2, 2, Checkpoint::kExceptLast, {}).timeline;
  EXPECT_THAT(timeline.peak_bytes(), ElementsAre(0, 0));
  auto twice = timeline;
  for (Span span : timeline.spans) {
    span.step = 1;
    span.start += 100;
    span.end += 100;
    twice.spans.push_back(span);
  }
  account(timeline, {cells(), cells()});
  account(twice, {cells(), cells()});
  EXPECT_EQ(print(twice), print(timeline) + print(timeline));
}

TEST(Footprint, IsReadOffTracesOfSingleMicroBatches) {
  auto last = cells();
  last.handed_over = 60;
  const std::vector<CellBytes> stages = {cells(), last};
  const auto never = run(2, 1, Checkpoint::kNever, stages).timeline;
  const auto always = run(2, 1, Checkpoint::kAlways, stages).timeline;
  const auto read = cell_bytes(never, always, {1, 1});
  for (int s = 0; s < 2; ++s) {
    EXPECT_EQ(read[s].handed_over, stages[s].handed_over);
    EXPECT_EQ(read[s].forward.kept, 1000);
    EXPECT_EQ(read[s].stored.kept, 100);
    EXPECT_EQ(read[s].stored.extra, 305);
    EXPECT_EQ(read[s].recompute.kept, 1000);
    EXPECT_EQ(read[s].backward.extra, 40);
    EXPECT_EQ(read[s].backward.kept, 10);
    EXPECT_EQ(read[s].parameters, 1);
  }
}

TEST(Footprint, RefusesBytesOfOtherStages) {
  try {
    run(2, 2, Checkpoint::kNever, {cells()});
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), HasSubstr("bytes are of 1 stages, the program has 2"));
  }
}

}  // namespace
}  // namespace gpipe
