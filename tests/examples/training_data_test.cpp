// The parts of the training program that speak in tensors: loader, metrics, picture.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <thread>

#include "examples/common/image.h"
#include "examples/common/picture.h"
#include "examples/unet/augment.h"
#include "examples/unet/loader.h"
#include "examples/unet/metrics.h"
#include "examples/unet/synthetic.h"
#include "tests/examples/fixtures.h"

namespace gpipe::examples::unet {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSamples = 11;
constexpr Size kSize{48, 32};

class LoaderTest : public ::testing::Test {
 protected:
  LoaderTest() {
    write_synthetic(directory_.path(), kSamples, kSize, 3);
    samples_ = list_samples(directory_.path());
  }

  std::vector<Batch> all(LoaderOptions options, Size size = kSize) {
    Loader loader(samples_, size, options);
    std::vector<Batch> batches;
    while (auto batch = loader.next()) batches.push_back(*batch);
    EXPECT_EQ(static_cast<int64_t>(batches.size()), loader.batches());
    return batches;
  }

  const TemporaryDirectory directory_;
  std::vector<Sample> samples_;
};

bool equal(const std::vector<Batch>& a, const std::vector<Batch>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Batch& x, const Batch& y) {
    return at::equal(x.images, y.images) && at::equal(x.masks, y.masks);
  });
}

TEST_F(LoaderTest, YieldsWhatTheFilesHold) {
  const auto batches = all({.batch_size = 4});
  ASSERT_EQ(batches.size(), 3u);
  EXPECT_EQ(batches[0].images.sizes(), at::IntArrayRef({4, 3, 32, 48}));
  EXPECT_EQ(batches[2].images.sizes(), at::IntArrayRef({3, 3, 32, 48}));
  EXPECT_EQ(batches[2].masks.sizes(), at::IntArrayRef({3, 1, 32, 48}));

  const Image image = read_image(samples_[5].image);
  const Image mask = read_mask(samples_[5].mask);
  const auto images = batches[1].images.accessor<float, 4>();
  const auto masks = batches[1].masks.accessor<uint8_t, 4>();
  for (int y = 0; y < kSize.height; ++y) {
    for (int x = 0; x < kSize.width; ++x) {
      for (int c = 0; c < 3; ++c) ASSERT_FLOAT_EQ(images[1][c][y][x], static_cast<float>(image.at(x, y)[c]) / 255);
      ASSERT_EQ(masks[1][0][y][x], *mask.at(x, y));
    }
  }
}

TEST_F(LoaderTest, WorkersDoNotChangeTheBatches) {
  for (const bool augment : {false, true}) {
    LoaderOptions options{.batch_size = 2, .workers = 1, .augment = augment, .shuffle = true, .seed = 5, .epoch = 1};
    const auto by_one = all(options);
    for (const int workers : {0, 4}) {
      options.workers = workers;
      EXPECT_TRUE(equal(by_one, all(options))) << workers;
    }
  }
}

TEST_F(LoaderTest, AugmentsOtherwiseInEachEpoch) {
  LoaderOptions options{.batch_size = 11, .seed = 5, .epoch = 1};
  const auto plain = all(options);
  options.augment = true;
  const auto first = all(options);
  options.epoch = 2;
  EXPECT_FALSE(equal(plain, first));
  EXPECT_FALSE(equal(first, all(options)));
}

TEST_F(LoaderTest, MayBeginInTheMiddle) {
  LoaderOptions options{.batch_size = 2, .augment = true, .shuffle = true, .seed = 5, .epoch = 1};
  auto whole = all(options);
  options.first_batch = 4;
  EXPECT_TRUE(equal({whole.begin() + 4, whole.end()}, all(options)));
  options.first_batch = 99;
  EXPECT_TRUE(all(options).empty());
}

TEST_F(LoaderTest, SamplesWithoutMasksGetZeros) {
  for (auto& sample : samples_) sample.mask.clear();
  EXPECT_EQ(all({.batch_size = 11})[0].masks.sum().item<int64_t>(), 0);
}

TEST_F(LoaderTest, SeedAndEpochShuffle) {
  const LoaderOptions first{.batch_size = 11, .shuffle = true, .seed = 5, .epoch = 1};
  LoaderOptions next_epoch = first;
  next_epoch.epoch = 2;
  LoaderOptions other_seed = first;
  other_seed.seed = 6;
  LoaderOptions in_order = first;
  in_order.shuffle = false;
  EXPECT_FALSE(equal(all(first), all(next_epoch)));
  EXPECT_FALSE(equal(all(first), all(other_seed)));
  EXPECT_FALSE(equal(all(first), all(in_order)));
  EXPECT_EQ(all(first)[0].masks.sum().item<double>(), all(in_order)[0].masks.sum().item<double>());
}

TEST_F(LoaderTest, AllSamplesComeOutAtOneSize) {
  write_jpeg(samples_[1].image, Image({100, 90}, 3));
  write_gif(samples_[1].mask, Image({100, 90}, 1));
  const auto batches = all({.batch_size = 3}, {24, 16});
  EXPECT_EQ(batches[0].images.sizes(), at::IntArrayRef({3, 3, 16, 24}));
  EXPECT_TRUE(at::logical_or(batches[0].masks == 0, batches[0].masks == 1).all().item<bool>());
}

TEST_F(LoaderTest, ADamagedFileFailsItsBatchAndAllAfter) {
  cut(samples_[5].image, std::filesystem::file_size(samples_[5].image) / 2);
  for (const int workers : {0, 1, 4}) {
    Loader loader(samples_, kSize, {.batch_size = 2, .workers = workers});
    EXPECT_TRUE(loader.next());
    EXPECT_TRUE(loader.next());
    for (int call = 0; call < 2; ++call) {
      EXPECT_THAT(error_of([&] { loader.next(); }), HasSubstr(samples_[5].image.string()));
    }
  }
}

TEST_F(LoaderTest, MayBeDestroyedAtAnyTime) {
  for (int taken = 0; taken <= 4; ++taken) {
    Loader loader(samples_, kSize, {.batch_size = 1, .workers = 3});
    for (int i = 0; i < taken; ++i) EXPECT_TRUE(loader.next());
  }
  cut(samples_[0].image, 40);
  const Loader loader(samples_, kSize, {.batch_size = 1, .workers = 3});
}

TEST_F(LoaderTest, DecodesNoFurtherThanItsBound) {
  // With one worker two batches may be decoded or under way, so a file of the third may still be changed.
  Loader loader(samples_, kSize, {.batch_size = 1, .workers = 1});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  cut(samples_[2].image, 40);
  EXPECT_TRUE(loader.next());
  EXPECT_TRUE(loader.next());
  EXPECT_THROW(loader.next(), std::runtime_error);
}

TEST_F(LoaderTest, RefusesWhatCannotBe) {
  EXPECT_THROW(Loader({}, kSize, {}), std::invalid_argument);
  EXPECT_THROW(Loader(samples_, {0, 32}, {}), std::invalid_argument);
  EXPECT_THROW(Loader(samples_, kSize, {.batch_size = 0}), std::invalid_argument);
  EXPECT_THROW(Loader(samples_, kSize, {.workers = -1}), std::invalid_argument);
}

at::Tensor labels(std::vector<int64_t> values) {
  const auto images = static_cast<int64_t>(values.size()) / 4;
  return at::tensor(values).view({images, 1, 2, 2}).to(at::kByte);
}

TEST(MetricsTest, CountsOverAllPixelsAndPerImage) {
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

TEST(MetricsTest, EachClassHasItsScoreAndAMeanIsOverThem) {
  Metrics metrics(4);
  metrics.add(labels({1, 2, 2, 0, 2, 2, 0, 0}), labels({1, 2, 1, 0, 2, 2, 2, 0}));
  const auto scores = metrics.scores();
  ASSERT_EQ(scores.pixels.size(), 3u);
  EXPECT_DOUBLE_EQ(scores.pixels[0].dice, 2.0 * 1 / 3);
  EXPECT_DOUBLE_EQ(scores.pixels[1].dice, 2.0 * 3 / 8);
  EXPECT_EQ(scores.pixels[2].dice, 1) << "neither predicted nor there";
  EXPECT_DOUBLE_EQ(scores.images[0].dice, (2.0 / 3 + 1) / 2);
  EXPECT_DOUBLE_EQ(scores.images[1].iou, (1.0 / 2 + 2.0 / 3) / 2);
  EXPECT_DOUBLE_EQ(mean(scores.pixels).dice, (2.0 / 3 + 3.0 / 4 + 1) / 3);
}

TEST(MetricsTest, TwoEmptyMasksAgree) {
  Metrics metrics(2);
  metrics.add(labels({0, 0, 0, 0}), labels({0, 0, 0, 0}));
  EXPECT_EQ(metrics.scores().pixels[0].dice, 1);
  EXPECT_EQ(metrics.scores().pixels[0].iou, 1);
  EXPECT_EQ(metrics.scores().images[0].dice, 1);
  EXPECT_EQ(metrics.scores().images[0].iou, 1);
}

TEST(MetricsTest, OneEmptyMaskScoresNothing) {
  Metrics metrics(2);
  metrics.add(labels({0, 0, 0, 1}), labels({0, 0, 0, 0}));
  EXPECT_EQ(metrics.scores().pixels[0].dice, 0);
  EXPECT_EQ(metrics.scores().images[0].iou, 0);
}

TEST(MetricsTest, NoImagesScoreNothing) { EXPECT_EQ(Metrics(2).scores().pixels[0].dice, 0); }

TEST(MetricsTest, ReadsStridedTensors) {
  Metrics metrics(2);
  metrics.add(labels({1, 0, 1, 0}).transpose(2, 3), labels({1, 1, 0, 0}));
  EXPECT_EQ(metrics.scores().pixels[0].dice, 1);
}

TEST(MetricsTest, RefusesWhatCannotBe) {
  Metrics metrics(2);
  EXPECT_THAT(error_of<std::invalid_argument>([&] {
                metrics.add(at::zeros({2, 1, 3, 3}, at::kByte), at::zeros({2, 3, 3}, at::kByte));
              }),
              AllOf(HasSubstr("[2, 1, 3, 3]"), HasSubstr("[2, 3, 3]")));
  EXPECT_THROW(metrics.add(labels({0, 0, 0, 2}), labels({0, 0, 0, 0})), std::out_of_range);
  EXPECT_THROW(Metrics(1), std::invalid_argument);
}

TEST(AugmentTest, MovesTheMaskWithTheImage) {
  // The mask marks the pixels whose red is above that of the background, so that it can be found again.
  int mirrored = 0;
  int shifted = 0;
  int recolored = 0;
  constexpr int kDraws = 200;
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    Image image({40, 24}, 3);
    std::fill(image.pixels.begin(), image.pixels.end(), 60);
    Image mask({40, 24}, 1);
    for (int y = 8; y < 16; ++y) {
      for (int x = 8; x < 14; ++x) {
        image.at(x, y)[0] = 190;
        *mask.at(x, y) = 3;
      }
    }
    Random random(seed);
    augment(image, mask, random);
    ASSERT_EQ(image.size(), (Size{40, 24}));
    ASSERT_EQ(mask.size(), (Size{40, 24}));
    const int background = image.at(20, 0)[0];
    int left = 40;
    for (int y = 0; y < 24; ++y) {
      for (int x = 0; x < 40; ++x) {
        ASSERT_EQ(*mask.at(x, y), image.at(x, y)[0] > background ? 3 : 0) << seed;
        if (*mask.at(x, y) != 0) left = std::min(left, x);
      }
    }
    mirrored += left > 18;
    shifted += left != 8 && left != 26;
    recolored += background != 60;
  }
  EXPECT_NEAR(mirrored, kDraws / 2, kDraws / 5);
  EXPECT_GT(shifted, kDraws / 2);
  EXPECT_GT(recolored, kDraws / 2);
}

TEST(PictureTest, PutsColumnsSideBySide) {
  auto images = at::zeros({2, 3, 4, 5});
  images[1][2].fill_(1);
  auto prediction = at::full({2, 3, 4, 5}, 0.5, at::kDouble);
  prediction[1][0][0][0] = 7;
  const Image picture = draw_picture({images, prediction});
  EXPECT_EQ(picture.size(), (Size{2 * 5 + 2, 2 * 4 + 2}));
  const auto pixel = [&](int x, int y) { return std::vector<int>(picture.at(x, y), picture.at(x, y) + 3); };
  EXPECT_EQ(pixel(0, 0), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(pixel(4, 9), (std::vector<int>{0, 0, 255}));
  EXPECT_EQ(pixel(7, 0), (std::vector<int>{128, 128, 128}));
  EXPECT_EQ(pixel(7, 6), (std::vector<int>{255, 128, 128}));
  EXPECT_EQ(pixel(5, 0), pixel(0, 4)) << "the lines between";
}

TEST(PictureTest, RefusesOtherShapes) {
  const auto images = at::zeros({2, 3, 4, 5});
  for (const auto& wrong : {at::zeros({2, 3, 4, 6}), at::zeros({2, 4, 5}), at::zeros({1, 3, 4, 5})}) {
    EXPECT_THROW(draw_picture({images, wrong}), std::invalid_argument);
  }
  EXPECT_THROW(draw_picture({at::zeros({2, 1, 4, 5})}), std::invalid_argument);
  EXPECT_THROW(draw_picture({}), std::invalid_argument);
}

}  // namespace
}  // namespace gpipe::examples::unet
