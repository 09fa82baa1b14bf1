#include "examples/unet/metrics.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/examples/fixtures.h"

namespace gpipe::examples::unet {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor labels(std::vector<int64_t> values) {
  const auto images = static_cast<int64_t>(values.size()) / 4;
  return at::tensor(values).view({images, 1, 2, 2}).to(at::kByte);
}

TEST(MetricsTest, ScoresAreOverAllPixelsAndPerImage) {
  Metrics metrics(2);
  // Image 1: 1 pixel in both, 2 predicted, 1 true. Image 2: nothing in common, 1 and 1.
  metrics.add(labels({1, 1, 0, 0, 1, 0, 0, 0}), labels({1, 0, 0, 0, 0, 1, 0, 0}));
  auto scores = metrics.scores();
  EXPECT_DOUBLE_EQ(scores.pixels[0].dice, 2.0 / 5);
  EXPECT_DOUBLE_EQ(scores.pixels[0].iou, 1.0 / 4);
  EXPECT_DOUBLE_EQ(scores.images[0].dice, (2.0 / 3 + 0) / 2);
  EXPECT_DOUBLE_EQ(scores.images[0].iou, (1.0 / 2 + 0) / 2);

  // Image 3, alone in its batch: 3 of 3 pixels right.
  metrics.add(labels({1, 1, 1, 0}), labels({1, 1, 1, 0}));
  scores = metrics.scores();
  EXPECT_DOUBLE_EQ(scores.pixels[0].dice, 2.0 * 4 / 11);
  EXPECT_DOUBLE_EQ(scores.pixels[0].iou, 4.0 / 7);
  EXPECT_DOUBLE_EQ(scores.images[0].dice, (2.0 / 3 + 0 + 1) / 3);
}

TEST(MetricsTest, ClassesHaveSeparateScoresAndAMean) {
  Metrics metrics(4);
  metrics.add(labels({1, 2, 2, 0, 2, 2, 0, 0}), labels({1, 2, 1, 0, 2, 2, 2, 0}));
  const auto scores = metrics.scores();
  ASSERT_EQ(scores.pixels.size(), 3u);
  EXPECT_DOUBLE_EQ(scores.pixels[0].dice, 2.0 * 1 / 3);
  EXPECT_DOUBLE_EQ(scores.pixels[1].dice, 2.0 * 3 / 8);
  EXPECT_EQ(scores.pixels[2].dice, 1) << "neither predicted nor true";
  EXPECT_DOUBLE_EQ(scores.images[0].dice, (2.0 / 3 + 1) / 2);
  EXPECT_DOUBLE_EQ(scores.images[1].iou, (1.0 / 2 + 2.0 / 3) / 2);
  EXPECT_DOUBLE_EQ(mean(scores.pixels).dice, (2.0 / 3 + 3.0 / 4 + 1) / 3);
}

TEST(MetricsTest, PartsOfTheImagesAddUp) {
  const auto predicted = labels({1, 1, 2, 0, 1, 0, 0, 2, 2, 2, 2, 1});
  const auto truth = labels({1, 0, 2, 0, 0, 1, 0, 2, 0, 0, 0, 1});
  Metrics whole(3);
  whole.add(predicted, truth);
  std::vector<double> sums(whole.sums().size());
  for (const auto& [begin, end] : {std::pair(0, 1), std::pair(1, 1), std::pair(1, 3)}) {
    Metrics part(3);
    part.add(predicted.slice(0, begin, end), truth.slice(0, begin, end));
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += part.sums()[i];
  }
  const auto scores = Metrics(3, sums).scores();
  for (std::size_t k = 0; k < 2; ++k) {
    EXPECT_EQ(scores.pixels[k].dice, whole.scores().pixels[k].dice);
    EXPECT_EQ(scores.pixels[k].iou, whole.scores().pixels[k].iou);
    EXPECT_DOUBLE_EQ(scores.images[k].dice, whole.scores().images[k].dice);
    EXPECT_DOUBLE_EQ(scores.images[k].iou, whole.scores().images[k].iou);
  }
}

TEST(MetricsTest, EmptyMasksScoreOne) {
  Metrics metrics(2);
  metrics.add(labels({0, 0, 0, 0}), labels({0, 0, 0, 0}));
  EXPECT_EQ(metrics.scores().pixels[0].dice, 1);
  EXPECT_EQ(metrics.scores().pixels[0].iou, 1);
  EXPECT_EQ(metrics.scores().images[0].dice, 1);
  EXPECT_EQ(metrics.scores().images[0].iou, 1);
}

TEST(MetricsTest, MaskOfOneSideScoresZero) {
  Metrics metrics(2);
  metrics.add(labels({0, 0, 0, 1}), labels({0, 0, 0, 0}));
  EXPECT_EQ(metrics.scores().pixels[0].dice, 0);
  EXPECT_EQ(metrics.scores().images[0].iou, 0);
}

TEST(MetricsTest, ScoreIsZeroWithoutImages) { EXPECT_EQ(Metrics(2).scores().pixels[0].dice, 0); }

TEST(MetricsTest, AcceptsStridedTensors) {
  Metrics metrics(2);
  metrics.add(labels({1, 0, 1, 0}).transpose(2, 3), labels({1, 1, 0, 0}));
  EXPECT_EQ(metrics.scores().pixels[0].dice, 1);
}

TEST(MetricsTest, RefusesInvalidArguments) {
  Metrics metrics(2);
  EXPECT_THAT(error_of<std::invalid_argument>([&] {
                metrics.add(at::zeros({2, 1, 3, 3}, at::kByte), at::zeros({2, 3, 3}, at::kByte));
              }),
              AllOf(HasSubstr("[2, 1, 3, 3]"), HasSubstr("[2, 3, 3]")));
  EXPECT_THROW(metrics.add(labels({0, 0, 0, 2}), labels({0, 0, 0, 0})), std::out_of_range);
  EXPECT_THROW(Metrics(1), std::invalid_argument);
}

}  // namespace
}  // namespace gpipe::examples::unet
