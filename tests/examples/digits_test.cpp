#include "examples/resnet18_mnist/digits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "tests/examples/fixtures.h"

namespace gpipe::examples::mnist {
namespace {

using ::testing::HasSubstr;

constexpr size_t kPixels = 28 * 28;

TEST(DigitsTest, PixelsAreTheSameOnEveryMachine) {
  const auto set = draw_digits(100, 1, Part::kTraining);
  EXPECT_EQ(fingerprint(set.pixels), 2883634152341579613u);
  EXPECT_EQ(fingerprint(set.labels), 9382960813641777166u);
}

TEST(DigitsTest, DigitDependsOnlyOnSeedAndPosition) {
  const auto few = draw_digits(5, 3, Part::kTraining);
  const auto many = draw_digits(9, 3, Part::kTraining);
  EXPECT_EQ(few.size, kDigitSize);
  EXPECT_EQ(few.pixels.size(), 5 * kPixels);
  EXPECT_TRUE(std::equal(few.pixels.begin(), few.pixels.end(), many.pixels.begin()));
  EXPECT_TRUE(std::equal(few.labels.begin(), few.labels.end(), many.labels.begin()));
  EXPECT_NE(draw_digits(5, 4, Part::kTraining).pixels, few.pixels);
  EXPECT_NE(draw_digits(5, 3, Part::kTest).pixels, few.pixels);
}

TEST(DigitsTest, ImagesDiffer) {
  std::set<std::vector<uint8_t>> images;
  for (const Part part : {Part::kTraining, Part::kTest}) {
    const auto set = draw_digits(1000, 0, part);
    for (auto at = set.pixels.begin(); at != set.pixels.end(); at += kPixels) images.emplace(at, at + kPixels);
  }
  EXPECT_EQ(images.size(), 2000u);
}

TEST(DigitsTest, DigitsAreEquallyFrequent) {
  const auto set = draw_digits(5000, 0, Part::kTraining);
  for (uint8_t digit = 0; digit < 10; ++digit) {
    EXPECT_NEAR(std::count(set.labels.begin(), set.labels.end(), digit), 500, 100) << int{digit};
  }
}

TEST(DigitsTest, DigitLiesInsideItsImage) {
  for (int i = 0; i < 2000; ++i) {
    Random random(static_cast<uint64_t>(i));
    const Image image = draw_digit(random, i % 10);
    int light = 0;
    int light_at_edge = 0;
    for (int y = 0; y < 28; ++y) {
      for (int x = 0; x < 28; ++x) {
        if (*image.at(x, y) <= 110) continue;
        ++light;
        light_at_edge += x == 0 || x == 27 || y == 0 || y == 27;
      }
    }
    EXPECT_GE(light, 8) << i;
    EXPECT_LT(light, 400) << i;
    EXPECT_LT(light_at_edge, 20) << i;
  }
}

// The share of `test` whose nearest mean image of `training` is that of its own digit.
double nearest_mean_accuracy(const LabelledImages& training, const LabelledImages& test) {
  std::array<std::array<double, kPixels>, 10> means{};
  std::array<double, 10> counts{};
  for (size_t i = 0; i < training.count(); ++i) {
    const uint8_t digit = training.labels[i];
    ++counts[digit];
    for (size_t p = 0; p < kPixels; ++p) means[digit][p] += training.pixels[i * kPixels + p];
  }
  for (size_t digit = 0; digit < 10; ++digit) {
    for (double& mean : means[digit]) mean /= counts[digit];
  }
  int right = 0;
  for (size_t i = 0; i < test.count(); ++i) {
    std::array<double, 10> distances{};
    for (size_t digit = 0; digit < 10; ++digit) {
      for (size_t p = 0; p < kPixels; ++p) {
        const double difference = means[digit][p] - test.pixels[i * kPixels + p];
        distances[digit] += difference * difference;
      }
    }
    const auto nearest = std::min_element(distances.begin(), distances.end()) - distances.begin();
    right += nearest == test.labels[i];
  }
  return right / static_cast<double>(test.count());
}

TEST(DigitsTest, NearestMeanDoesNotClassifyThem) {
  const double accuracy =
      nearest_mean_accuracy(draw_digits(5000, 0, Part::kTraining), draw_digits(1000, 0, Part::kTest));
  RecordProperty("nearest_mean_accuracy", std::to_string(accuracy));
  EXPECT_LT(accuracy, 0.9);
  EXPECT_GT(accuracy, 0.3) << "not noise either";
}

TEST(DigitsTest, WrittenFilesAreReadBack) {
  const TemporaryDirectory directory;
  write_digits(directory / "made", 30, 20, 5);
  const auto training = read_idx(training_files(directory / "made"));
  EXPECT_EQ(training.pixels, draw_digits(30, 5, Part::kTraining).pixels);
  EXPECT_EQ(training.labels, draw_digits(30, 5, Part::kTraining).labels);
  EXPECT_EQ(read_idx(test_files(directory / "made")).pixels, draw_digits(20, 5, Part::kTest).pixels);
}

TEST(DigitsTest, RefusesInvalidArguments) {
  const TemporaryDirectory directory;
  EXPECT_THROW(write_digits(directory / "none", 0, 1, 5), std::invalid_argument);
  EXPECT_THROW(write_digits(directory / "none", 1, 0, 5), std::invalid_argument);
  EXPECT_FALSE(std::filesystem::exists(directory / "none"));
  write_text(directory / "file", "x");
  EXPECT_THAT(error_of([&] { write_digits(directory / "file", 1, 1, 5); }), HasSubstr((directory / "file").string()));
}

}  // namespace
}  // namespace gpipe::examples::mnist
