#include "examples/common/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace gpipe::examples {
namespace {

// Returns the value that a validator accepts, or why it refuses it.
std::string result(const CLI::Validator& validator, std::string text) {
  const auto refusal = validator(text);
  return refusal.empty() ? text : refusal;
}

TEST(FlagsTest, WholeNumbersAreDecimalDigitsInRange) {
  const auto validator = whole_number(1, 1000);
  for (const auto* good : {"1", "999", "1000"}) EXPECT_EQ(result(validator, good), good);
  EXPECT_EQ(result(validator, "010"), "10");
  for (const std::string low : {"0", "-1", "-99999999999999999999999"}) {
    EXPECT_EQ(result(validator, low), "must be at least 1, but is " + low);
  }
  for (const std::string high : {"1001", "18446744073709551617", "99999999999999999999999"}) {
    EXPECT_EQ(result(validator, high), "must be at most 1000, but is " + high);
  }
  for (const std::string bad : {"+1", " 1", "1 ", "1.0", "1e2", "0x1", "1_0", "nan", "-", ""}) {
    EXPECT_EQ(result(validator, bad), "must be a whole number, but is '" + bad + "'");
  }
}

TEST(FlagsTest, SeedsHave64Bits) {
  const auto validator = whole_number(0, std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(result(validator, "18446744073709551615"), "18446744073709551615");
  EXPECT_EQ(result(validator, "18446744073709551616"),
            "must be at most 18446744073709551615, but is 18446744073709551616");
  EXPECT_EQ(result(validator, "-1"), "must be at least 0, but is -1");
}

TEST(FlagsTest, NumbersAreFiniteAndInRange) {
  const auto between = number_between(0.001, 1);
  for (const auto* good : {"0.5", "1", "1e-3", ".25"}) {
    EXPECT_EQ(result(between, good), good);
    EXPECT_EQ(result(positive_number(), good), good);
    EXPECT_EQ(result(non_negative_number(), good), good);
  }
  EXPECT_EQ(result(non_negative_number(), "0"), "0");
  EXPECT_EQ(result(non_negative_number(), "-1"), "must be at least 0, but is -1");
  EXPECT_EQ(result(positive_number(), "0"), "must be above 0, but is 0");
  EXPECT_EQ(result(between, "0"), "must be at least 0.001, but is 0");
  EXPECT_EQ(result(between, "2"), "must be at most 1, but is 2");
  for (const std::string bad : {"nan", "-nan", "inf", "-inf", "1e999", "", "x", "1x", " 1", "0x1"}) {
    for (const auto& validator : {between, positive_number(), non_negative_number()}) {
      EXPECT_EQ(result(validator, bad), "must be a finite number, but is '" + bad + "'");
    }
  }
}

TEST(FlagsTest, PathsAreNotEmpty) {
  EXPECT_EQ(result(path_name(), "."), ".");
  EXPECT_EQ(result(path_name(), ""), "must be a path, but is ''");
}

TEST(FlagsTest, SizesAreWidthAndHeight) {
  EXPECT_EQ(result(image_size_text(), "192x128"), "192x128");
  for (const std::string bad : {"192", "0x5", "192x128x3", "-1x5", "big", ""}) {
    EXPECT_EQ(result(image_size_text(), bad), "must be a size such as 192x128, but is '" + bad + "'");
  }
}

TEST(FlagsTest, NumbersAreWrittenWithAllTheirDigits) {
  EXPECT_EQ(to_flag(0.005), "0.005");
  EXPECT_EQ(to_flag(1.0 / 3), "0.3333333333333333");
  EXPECT_EQ(to_number(to_flag(0.1)), 0.1);
}

}  // namespace
}  // namespace gpipe::examples
