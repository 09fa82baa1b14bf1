#include "examples/common/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace gpipe::examples {
namespace {

// What a validator makes of a value: the value, or why it refuses it.
std::string result(const CLI::Validator& validator, std::string text) {
  const auto refusal = validator(text);
  return refusal.empty() ? text : refusal;
}

TEST(FlagsTest, WholeNumbersAreDecimalDigitsInRange) {
  const auto validator = whole_number(1, 1000);
  for (const auto* good : {"1", "999", "1000"}) EXPECT_EQ(result(validator, good), good);
  EXPECT_EQ(result(validator, "010"), "10");
  for (const std::string bad : {"0", "1001", "-1", "+1", " 1", "1 ", "1.0", "1e2", "0x1", "1_0", "nan", "",
                                "18446744073709551617", "99999999999999999999999"}) {
    EXPECT_EQ(result(validator, bad), "'" + bad + "' is not a whole number from 1 to 1000");
  }
}

TEST(FlagsTest, SeedsHave64Bits) {
  const auto validator = whole_number(0, std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(result(validator, "18446744073709551615"), "18446744073709551615");
  EXPECT_THAT(result(validator, "18446744073709551616"), ::testing::EndsWith("from 0 to 18446744073709551615"));
  EXPECT_THAT(result(validator, "-1"), ::testing::EndsWith("from 0 to 18446744073709551615"));
}

TEST(FlagsTest, NumbersAreFinite) {
  for (const auto* good : {"0.5", "1", "1e-3", ".25"}) {
    EXPECT_EQ(result(number_between(0.001, 1), good), good);
    EXPECT_EQ(result(positive_number(), good), good);
    EXPECT_EQ(result(non_negative_number(), good), good);
  }
  EXPECT_EQ(result(non_negative_number(), "0"), "0");
  EXPECT_EQ(result(positive_number(), "0"), "'0' is not a finite number above 0");
  for (const std::string bad : {"nan", "-nan", "inf", "-inf", "-1", "1e999", "", "x", "1x", " 1", "0x1"}) {
    EXPECT_EQ(result(number_between(0.001, 1), bad), "'" + bad + "' is not a number from 0.001 to 1");
    EXPECT_EQ(result(positive_number(), bad), "'" + bad + "' is not a finite number above 0");
    EXPECT_EQ(result(non_negative_number(), bad), "'" + bad + "' is not a finite number of at least 0");
  }
  EXPECT_EQ(result(number_between(0.001, 1), "2"), "'2' is not a number from 0.001 to 1");
}

TEST(FlagsTest, PathsAreNotEmpty) {
  EXPECT_EQ(result(path_name(), "."), ".");
  EXPECT_EQ(result(path_name(), ""), "'' is not a path");
}

TEST(FlagsTest, SizesAreWidthAndHeight) {
  EXPECT_EQ(result(image_size_text(), "192x128"), "192x128");
  for (const std::string bad : {"192", "0x5", "192x128x3", "-1x5", "big", ""}) {
    EXPECT_EQ(result(image_size_text(), bad), "'" + bad + "' is not a size; give it as 192x128");
  }
}

TEST(FlagsTest, NumbersAreWrittenWithAllTheirDigits) {
  EXPECT_EQ(to_flag(0.005), "0.005");
  EXPECT_EQ(to_flag(1.0 / 3), "0.3333333333333333");
  EXPECT_EQ(to_number(to_flag(0.1)), 0.1);
}

}  // namespace
}  // namespace gpipe::examples
