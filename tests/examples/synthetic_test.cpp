#include "examples/unet/synthetic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>

#include "examples/unet/carvana.h"
#include "examples/unet/scene.h"
#include "tests/examples/fixtures.h"

namespace gpipe::examples::unet {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SceneTest, PixelsAreTheSameOnEveryMachine) {
  Random random(1);
  const Scene scene = draw_scene(random, {96, 64});
  EXPECT_EQ(fingerprint(scene.image.pixels), 4190423306004087299u);
  EXPECT_EQ(fingerprint(scene.mask.pixels), 713552495761474279u);
}

TEST(SceneTest, CarHasAReasonableSize) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const Scene scene = draw_scene(random, {96, 64});
    const auto car = std::accumulate(scene.mask.pixels.begin(), scene.mask.pixels.end(), 0);
    EXPECT_GT(car, 96 * 64 * 3 / 100) << seed;
    EXPECT_LT(car, 96 * 64 * 50 / 100) << seed;
  }
}

TEST(SceneTest, AcceptsAnySizeFromSixteenPixels) {
  for (const Size size : {Size{16, 16}, Size{17, 200}, Size{400, 20}, Size{640, 480}}) {
    Random random(5);
    EXPECT_EQ(draw_scene(random, size).image.size(), size);
  }
  Random random(5);
  EXPECT_THROW(draw_scene(random, {15, 64}), std::invalid_argument);
}

TEST(SyntheticTest, WrittenSamplesAreReadBack) {
  const TemporaryDirectory directory;
  write_synthetic(directory.path(), 3, {96, 64}, 9);
  const auto samples = list_samples(directory.path());
  ASSERT_EQ(samples.size(), 3u);
  for (size_t i = 0; i < samples.size(); ++i) {
    Random random(9, i);
    const Scene scene = draw_scene(random, {96, 64});
    EXPECT_EQ(read_mask(samples[i].mask).pixels, scene.mask.pixels);
    const Image image = read_image(samples[i].image);
    double difference = 0;
    for (size_t k = 0; k < image.pixels.size(); ++k) difference += std::abs(image.pixels[k] - scene.image.pixels[k]);
    EXPECT_LT(difference / static_cast<double>(image.pixels.size()), 12);
  }
}

TEST(SyntheticTest, SampleDependsOnlyOnSeedAndPosition) {
  const TemporaryDirectory directory;
  write_synthetic(directory / "a", 2, {64, 48}, 9);
  write_synthetic(directory / "b", 4, {64, 48}, 9);
  write_synthetic(directory / "c", 2, {64, 48}, 10);
  EXPECT_EQ(read_bytes(directory / "a/imgs/0001.jpg"), read_bytes(directory / "b/imgs/0001.jpg"));
  EXPECT_EQ(read_bytes(directory / "a/masks/0001_mask.gif"), read_bytes(directory / "b/masks/0001_mask.gif"));
  EXPECT_NE(read_bytes(directory / "a/imgs/0001.jpg"), read_bytes(directory / "c/imgs/0001.jpg"));
  EXPECT_NE(read_bytes(directory / "a/imgs/0000.jpg"), read_bytes(directory / "a/imgs/0001.jpg"));
}

TEST(SyntheticTest, RefusesFoldersWithOtherFiles) {
  const TemporaryDirectory directory;
  write_synthetic(directory.path(), 3, {64, 48}, 9);
  EXPECT_NO_THROW(write_synthetic(directory.path(), 3, {64, 48}, 10));
  EXPECT_THAT(error_of([&] {
                write_synthetic(directory.path(), 2, {64, 48}, 9);
              }),
              AllOf(HasSubstr(directory.path().string()), HasSubstr("0002.jpg")));
}

TEST(SyntheticTest, RefusesInvalidArguments) {
  const TemporaryDirectory directory;
  EXPECT_THROW(write_synthetic(directory.path(), 0, {64, 48}, 1), std::invalid_argument);
  EXPECT_THROW(write_synthetic(directory.path(), 1, {4, 4}, 1), std::invalid_argument);
}

// The best mean Dice of predicting a car where a pixel's value is above, or not above, a fixed threshold.
double best_threshold_dice(const std::vector<Scene>& scenes, const std::function<int(const uint8_t*)>& value) {
  using Histogram = std::array<int64_t, 256>;
  std::array<double, 512> sums{};
  for (const Scene& scene : scenes) {
    Histogram all{};
    Histogram car{};
    for (size_t i = 0; i < scene.mask.pixels.size(); ++i) {
      const auto bin = static_cast<size_t>(value(&scene.image.pixels[3 * i]));
      ++all[bin];
      car[bin] += scene.mask.pixels[i];
    }
    const auto total = std::accumulate(all.begin(), all.end(), int64_t{0});
    const auto truth = std::accumulate(car.begin(), car.end(), int64_t{0});
    int64_t low = 0;
    int64_t low_car = 0;
    for (size_t threshold = 0; threshold < 256; ++threshold) {
      low += all[threshold];
      low_car += car[threshold];
      sums[2 * threshold] += 2.0 * static_cast<double>(low_car) / static_cast<double>(low + truth);
      sums[2 * threshold + 1] += 2.0 * static_cast<double>(truth - low_car) / static_cast<double>(total - low + truth);
    }
  }
  return *std::max_element(sums.begin(), sums.end()) / static_cast<double>(scenes.size());
}

TEST(SyntheticTest, NoFixedThresholdFindsTheCar) {
  std::vector<Scene> scenes;
  for (uint64_t i = 0; i < 200; ++i) {
    Random random(0, i);
    scenes.push_back(draw_scene(random, {96, 64}));
  }
  const auto luminance = [](const uint8_t* p) { return (299 * p[0] + 587 * p[1] + 114 * p[2]) / 1000; };
  const auto saturation = [](const uint8_t* p) {
    const auto [low, high] = std::minmax({p[0], p[1], p[2]});
    return high == 0 ? 0 : 255 * (high - low) / high;
  };
  const double by_luminance = best_threshold_dice(scenes, luminance);
  const double by_saturation = best_threshold_dice(scenes, saturation);
  RecordProperty("dice_by_luminance", std::to_string(by_luminance));
  RecordProperty("dice_by_saturation", std::to_string(by_saturation));
  EXPECT_LT(by_luminance, 0.8);
  EXPECT_LT(by_saturation, 0.8);
}

}  // namespace
}  // namespace gpipe::examples::unet
