#include "gpipe/schedule/footprint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "gpipe/schedule/generators.h"
#include "gpipe/simulator.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::straight;

/// Each kind of bytes has its own decimal digit: forward 1,000, stored 100, recomputed 900, sent 10, parameters 1.
CellBytes cells(int stage) {
  return {.forward = {1005, {{1000, Kind::W, stage}}},
          .stored = {305, {{100, Kind::W, stage}}},
          .recompute = {905, {{900, Kind::W, stage}}},
          .backward = {40, {{10, Kind::I, stage == 0 ? HeldBytes::kNeverFreed : stage - 1}}},
          .parameters = 1};
}

/// Makes `bytes` of each forward outputs, which the caller takes.
CellBytes handing_over(CellBytes last, std::int64_t bytes) {
  for (ActionBytes* forward : {&last.forward, &last.stored}) {
    forward->held.front().bytes -= bytes;
    forward->held.push_back({bytes, Kind::F, HeldBytes::kUntilForwardsEnd});
  }
  return last;
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

TEST(Footprint, GraphsAccumulateUntilTheDrain) {
  const auto simulation = run(2, 2, Checkpoint::kNever, {cells(0), cells(1)});
  EXPECT_EQ(print(simulation.timeline),
            "0F0 0 1005 1000; 0F1 1000 2005 2000; 0B1 2000 2040 1011; 0B0 1011 1051 21; "
            "1F0 0 1005 1000; 1F1 1000 2005 2000; 1B1 2000 2040 1011; 1B0 1011 1051 11; ");
  EXPECT_THAT(simulation.timeline.peak_bytes(), ElementsAre(2040, 2040));
}

TEST(Footprint, RecomputedCellHoldsItsGraphFromItsRecompute) {
  const auto simulation = run(2, 2, Checkpoint::kAlways, {cells(0), cells(1)});
  EXPECT_EQ(
      print(simulation.timeline),
      "0F0 0 305 100; 0F1 100 405 200; 0R1 200 1105 1100; 0B1 1100 1140 111; 0R0 111 1016 1011; 0B0 1011 1051 21; "
      "1F0 0 305 100; 1F1 100 405 200; 1R1 200 1105 1100; 1B1 1100 1140 111; 1R0 111 1016 1011; 1B0 1011 1051 11; ");
}

TEST(Footprint, OutputsBelongToTheCallerAfterTheLastForward) {
  const auto simulation = run(2, 2, Checkpoint::kNever, {cells(0), handing_over(cells(1), 400)});
  EXPECT_EQ(print(simulation.timeline).substr(print(simulation.timeline).find("1F0")),
            "1F0 0 1005 1000; 1F1 1000 2005 2000; 1B1 1200 1240 611; 1B0 611 651 11; ");
}

TEST(Footprint, PeakIsAtLeastTheBytesAfterTheAction) {
  auto bytes = cells(0);
  bytes.forward.extra = 700;
  const auto simulation = run(1, 2, Checkpoint::kNever, {bytes});
  EXPECT_EQ(print(simulation.timeline).substr(0, 41), "0F0 0 1000 1000; 0F1 1000 2000 2000; 0B1 ");
}

TEST(Footprint, GradientsAreHeldUntilASlowReceiverHasRun) {
  const auto layout = straight(2, 3);
  const auto program = testing::make(layout, chain(2, 3), fill_drain(layout, Checkpoint::kNever));
  const auto simulation = simulate(program, {{{{1, 0, 100, 0, 0}}, {{1, 0, 1, 0, 0}}}, {0}, {cells(0), cells(1)}});
  EXPECT_EQ(simulation.timeline.spans.back().bytes.after, 31);
}

TEST(Footprint, StepsAreAccountedSeparately) {
  auto timeline = run(2, 2, Checkpoint::kExceptLast, {}).timeline;
  EXPECT_THAT(timeline.peak_bytes(), ElementsAre(0, 0));
  auto twice = timeline;
  for (Span span : timeline.spans) {
    span.step = 1;
    span.start += 100;
    span.end += 100;
    twice.spans.push_back(span);
  }
  account(timeline, {cells(0), cells(1)});
  account(twice, {cells(0), cells(1)});
  EXPECT_EQ(print(twice), print(timeline) + print(timeline));
}

TEST(Footprint, BytesCanBeHeldUntilAnActionOfAnotherStage) {
  auto sender = cells(0);
  sender.forward.held = {{1000, Kind::F, 1}};
  const auto simulation = run(2, 2, Checkpoint::kNever, {sender, cells(1)});
  EXPECT_EQ(simulation.timeline.spans[1].bytes.before, 1000);
  EXPECT_EQ(simulation.timeline.spans[2].bytes.before, 0);
}

TEST(Footprint, BytesCanBeHeldUntilTheLaterOfTwoActions) {
  auto sender = cells(0);
  sender.forward.held = {{1000, Kind::F, 1, /*until_own_backward=*/true}};
  const auto simulation = run(2, 2, Checkpoint::kNever, {sender, cells(1)});
  EXPECT_EQ(print(simulation.timeline).substr(0, 83),
            "0F0 0 1005 1000; 0F1 1000 2005 2000; 0B1 2000 2040 1011; 0B0 1011 1051 21; 1F0 0 10");
}

TEST(Footprint, RefusesBytesOfOtherStages) {
  const auto message = [](std::vector<CellBytes> bytes) -> std::string {
    try {
      run(2, 2, Checkpoint::kNever, std::move(bytes));
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message({cells(0)}), HasSubstr("got bytes for 1 stages, but the program has 2 stages"));
  auto bad = cells(1);
  bad.backward.held = {{10, Kind::I, 2}};
  EXPECT_THAT(message({cells(0), bad}), HasSubstr("held until I of stage 2, but there are 2 stages"));
}

}  // namespace
}  // namespace gpipe
