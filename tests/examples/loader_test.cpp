#include "examples/unet/loader.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "examples/common/image.h"
#include "examples/unet/synthetic.h"
#include "tests/examples/fixtures.h"

namespace gpipe::examples::unet {
namespace {

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

TEST_F(LoaderTest, BatchesHoldTheFiles) {
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

TEST_F(LoaderTest, BatchesDoNotDependOnWorkers) {
  for (const bool augment : {false, true}) {
    LoaderOptions options{.batch_size = 2, .workers = 1, .augment = augment, .shuffle = true, .seed = 5, .epoch = 1};
    const auto by_one = all(options);
    for (const int workers : {0, 4}) {
      options.workers = workers;
      EXPECT_TRUE(equal(by_one, all(options))) << workers;
    }
  }
}

TEST_F(LoaderTest, EachEpochIsAugmentedDifferently) {
  LoaderOptions options{.batch_size = 11, .seed = 5, .epoch = 1};
  const auto plain = all(options);
  options.augment = true;
  const auto first = all(options);
  options.epoch = 2;
  EXPECT_FALSE(equal(plain, first));
  EXPECT_FALSE(equal(first, all(options)));
}

TEST_F(LoaderTest, CanStartAtAnyBatch) {
  LoaderOptions options{.batch_size = 2, .augment = true, .shuffle = true, .seed = 5, .epoch = 1};
  auto whole = all(options);
  options.first_batch = 4;
  EXPECT_TRUE(equal({whole.begin() + 4, whole.end()}, all(options)));
  options.first_batch = 99;
  EXPECT_TRUE(all(options).empty());
}

TEST_F(LoaderTest, MissingMasksAreZero) {
  for (auto& sample : samples_) sample.mask.clear();
  EXPECT_EQ(all({.batch_size = 11})[0].masks.sum().item<int64_t>(), 0);
}

TEST_F(LoaderTest, OrderDependsOnSeedAndEpoch) {
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

TEST_F(LoaderTest, SamplesAreResizedToOneSize) {
  write_jpeg(samples_[1].image, Image({100, 90}, 3));
  write_gif(samples_[1].mask, Image({100, 90}, 1));
  const auto batches = all({.batch_size = 3}, {24, 16});
  EXPECT_EQ(batches[0].images.sizes(), at::IntArrayRef({3, 3, 16, 24}));
  EXPECT_TRUE(at::logical_or(batches[0].masks == 0, batches[0].masks == 1).all().item<bool>());
}

TEST_F(LoaderTest, DamagedFileFailsItsBatchAndLaterOnes) {
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

TEST_F(LoaderTest, CanBeDestroyedAtAnyTime) {
  for (int taken = 0; taken <= 4; ++taken) {
    Loader loader(samples_, kSize, {.batch_size = 1, .workers = 3});
    for (int i = 0; i < taken; ++i) EXPECT_TRUE(loader.next());
  }
  cut(samples_[0].image, 40);
  const Loader loader(samples_, kSize, {.batch_size = 1, .workers = 3});
}

TEST_F(LoaderTest, DecodesOnlyAFewBatchesInAdvance) {
  // With one worker, two batches are decoded or being decoded. The file of the third can still be changed.
  Loader loader(samples_, kSize, {.batch_size = 1, .workers = 1});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  cut(samples_[2].image, 40);
  EXPECT_TRUE(loader.next());
  EXPECT_TRUE(loader.next());
  EXPECT_THROW(loader.next(), std::runtime_error);
}

TEST_F(LoaderTest, RefusesInvalidArguments) {
  EXPECT_THROW(Loader({}, kSize, {}), std::invalid_argument);
  EXPECT_THROW(Loader(samples_, {0, 32}, {}), std::invalid_argument);
  EXPECT_THROW(Loader(samples_, kSize, {.batch_size = 0}), std::invalid_argument);
  EXPECT_THROW(Loader(samples_, kSize, {.workers = -1}), std::invalid_argument);
}

}  // namespace
}  // namespace gpipe::examples::unet
