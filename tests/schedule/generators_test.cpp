#include "gpipe/schedule/generators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <utility>

#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::layout_of;
using testing::print;
using testing::straight;
using ::testing::ThrowsMessage;

TEST(Fill, RunsMicroBatchesInOrder) {
  EXPECT_THAT(print(fill(straight(2, 3))), ElementsAre("0F0 0F1 0F2", "1F0 1F1 1F2"));
  EXPECT_THAT(print(fill(straight(1, 1))), ElementsAre("0F0"));
}

TEST(Fill, RunsTheStagesOfAWorkerInOrder) {
  EXPECT_THAT(print(fill(layout_of({0, 1, 0}, 2))), ElementsAre("0F0 0F1 2F0 2F1", "1F0 1F1"));
}

TEST(FillDrain, WithCheckpointNeverHasNoRecompute) {
  EXPECT_THAT(print(fill_drain(straight(2, 2), Checkpoint::kNever)), ElementsAre("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"));
}

TEST(FillDrain, WithCheckpointExceptLastDoesNotRecomputeTheLastMicroBatch) {
  EXPECT_THAT(print(fill_drain(straight(2, 3), Checkpoint::kExceptLast)),
              ElementsAre("0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0", "1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0"));
  EXPECT_THAT(print(fill_drain(straight(1, 1), Checkpoint::kExceptLast)), ElementsAre("0F0 0B0"));
}

TEST(FillDrain, WithCheckpointAlwaysRecomputesEveryCell) {
  EXPECT_THAT(print(fill_drain(straight(2, 2), Checkpoint::kAlways)),
              ElementsAre("0F0 0F1 0R1 0B1 0R0 0B0", "1F0 1F1 1R1 1B1 1R0 1B0"));
  EXPECT_THAT(print(fill_drain(straight(1, 1), Checkpoint::kAlways)), ElementsAre("0F0 0R0 0B0"));
}

TEST(FillDrain, DrainsTheStagesOfAWorkerInReverse) {
  EXPECT_THAT(print(fill_drain(layout_of({0, 1, 1, 0}, 2), Checkpoint::kExceptLast)),
              ElementsAre("0F0 0F1 3F0 3F1 3B1 3R0 3B0 0B1 0R0 0B0", "1F0 1F1 2F0 2F1 2B1 2R0 2B0 1B1 1R0 1B0"));
}

TEST(Generators, RefuseTooManyCells) {
  constexpr int kMost = std::numeric_limits<int>::max();
  // In int arithmetic 65536 x 65536 would be 0, and 65537 x 65536 would be 65536.
  for (const auto& [stages, micro_batches] :
       {std::pair(2, kMost), std::pair(kMost, 2), std::pair(1 << 16, 1 << 16), std::pair((1 << 16) + 1, 1 << 16)}) {
    const auto make = [stages = stages, micro_batches = micro_batches] {
      make_program({stages, micro_batches, {}}, {}, {});
    };
    EXPECT_THAT(make, ThrowsMessage<std::invalid_argument>(HasSubstr("at most 4194304 cells"))) << stages;
  }
  EXPECT_THROW(fill(straight(2, kMost)), std::invalid_argument);
  EXPECT_THROW(fill_drain(straight(2, kMost), Checkpoint::kNever), std::invalid_argument);
  EXPECT_THAT([] { make_program({-1, 1, {}}, {}, {}); }, ThrowsMessage<std::invalid_argument>(HasSubstr("-1 stages")));
}

TEST(Generators, RefuseInvalidLayouts) {
  EXPECT_THROW(fill(layout_of({0, 2}, 1)), std::invalid_argument);
  EXPECT_THROW(fill(layout_of({0, -1}, 1)), std::invalid_argument);
  EXPECT_THROW(fill_drain(straight(2, 0), Checkpoint::kNever), std::invalid_argument);
}

}  // namespace
}  // namespace gpipe
