#include "gpipe/schedule/schedule_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <stdexcept>
#include <stdexcept>
#include <string>

#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using ::testing::HasSubstr;

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
  const auto error = [](const char* text) -> std::string {
    try {
      parse_schedule(text);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
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
