#include "examples/unet/segmentation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <algorithm>

#include "examples/unet/carvana.h"
#include "examples/unet/classes.h"
#include "examples/unet/model.h"
#include "examples/unet/overlay.h"
#include "examples/unet/scene.h"
#include "examples/unet/synthetic.h"
#include "gpipe/loss.h"
#include "tests/examples/fixtures.h"

namespace gpipe::examples::unet {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<int> color_of(int label) {
  const Color color = class_color(static_cast<Label>(label));
  return {color.red, color.green, color.blue};
}

TEST(ClassesTest, ColoursAreThoseOfPascalVoc) {
  EXPECT_EQ(color_of(0), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(color_of(1), (std::vector<int>{128, 0, 0}));
  EXPECT_EQ(color_of(2), (std::vector<int>{0, 128, 0}));
  EXPECT_EQ(color_of(3), (std::vector<int>{128, 128, 0}));
  EXPECT_EQ(color_of(8), (std::vector<int>{64, 0, 0}));
  EXPECT_EQ(color_of(15), (std::vector<int>{192, 128, 128}));
  EXPECT_EQ(color_of(20), (std::vector<int>{0, 64, 128}));
}

TEST(OverlayTest, OutlineIsVisibleOnAnyColour) {
  Image labels({40, 30}, 1);
  for (int y = 10; y < 20; ++y) std::fill_n(labels.at(10, y), 20, uint8_t{1});
  for (const uint8_t grey : {0, 128, 255}) {
    Image image({40, 30}, 3);
    std::fill(image.pixels.begin(), image.pixels.end(), grey);
    const Image result = overlay(image, labels, 2);
    const auto pixel = [&](int x, int y) { return std::vector<int>(result.at(x, y), result.at(x, y) + 3); };
    EXPECT_EQ(pixel(10, 15), (std::vector<int>{255, 255, 255})) << "inside";
    EXPECT_EQ(pixel(9, 15), (std::vector<int>{0, 0, 0})) << "outside";
    EXPECT_EQ(pixel(20, 10), (std::vector<int>{255, 255, 255}));
    EXPECT_EQ(pixel(20, 9), (std::vector<int>{0, 0, 0}));
    EXPECT_EQ(pixel(2, 2), (std::vector<int>{grey, grey, grey})) << "the background keeps its colour";
    EXPECT_GT(pixel(20, 15)[0], pixel(20, 15)[1]) << "the inside is tinted red";
  }
}

class MaskFileTest : public ::testing::Test {
 protected:
  std::filesystem::path write(const Image& image) {
    write_png(directory_ / "mask.png", image);
    return directory_ / "mask.png";
  }

  const TemporaryDirectory directory_;
};

TEST_F(MaskFileTest, PaintedLabelsAreReadBack) {
  for (const int classes : {2, 3, 21, kMaxClasses}) {
    Image labels({kMaxClasses, 3}, 1);
    for (size_t i = 0; i < labels.pixels.size(); ++i) labels.pixels[i] = static_cast<uint8_t>(i % classes);
    const auto path = write(paint_labels(labels, classes));
    EXPECT_EQ(read_labels(path, classes).pixels, labels.pixels) << classes;
    EXPECT_EQ(read_labels(path, classes, {16, 3}).pixels, resize_nearest(labels, {16, 3}).pixels);
  }
}

TEST_F(MaskFileTest, GreyLevelsAreClasses) {
  Image grey({3, 1}, 1);
  grey.pixels = {0, 4, 2};
  EXPECT_EQ(read_labels(write(grey), 5).pixels, grey.pixels);
  EXPECT_THAT(error_of([&] { read_labels(write(grey), 4); }), AllOf(HasSubstr("mask.png"), HasSubstr("4,4,4")));
}

TEST(SceneClassesTest, PartsOfACarHaveTheirOwnClasses) {
  for (int classes = 2; classes <= kSceneClasses; ++classes) {
    Random random(3);
    const Scene scene = draw_scene(random, {192, 128}, classes);
    for (int label = 0; label < kSceneClasses; ++label) {
      const auto count = std::count(scene.mask.pixels.begin(), scene.mask.pixels.end(), label);
      EXPECT_EQ(count > 0, label < classes) << label << " of " << classes;
    }
  }
  Random random(3);
  EXPECT_THROW(draw_scene(random, {192, 128}, 1), std::invalid_argument);
  EXPECT_THROW(draw_scene(random, {192, 128}, kSceneClasses + 1), std::invalid_argument);
}

TEST(SceneClassesTest, MasksAreWrittenInColour) {
  const TemporaryDirectory directory;
  write_synthetic(directory.path(), 2, {96, 64}, 9, 3);
  const auto samples = list_samples(directory.path());
  Random random(9, 1);
  EXPECT_EQ(read_labels(samples.at(1).mask, 3).pixels, draw_scene(random, {96, 64}, 3).mask.pixels);
}

TEST(SegmentationLossTest, LossIsCrossEntropyAndDice) {
  torch::manual_seed(1);
  const auto logits = torch::randn({2, 4, 5, 6});
  const auto labels = torch::randint(4, {2, 1, 5, 6}).to(torch::kByte);
  const auto probabilities = logits.softmax(1);
  double cross_entropy = 0;
  for (int n = 0; n < 2; ++n) {
    for (int y = 0; y < 5; ++y) {
      for (int x = 0; x < 6; ++x) {
        const auto label = labels[n][0][y][x].item<std::int64_t>();
        cross_entropy -= std::log(probabilities[n][label][y][x].item<double>()) / 60;
      }
    }
  }
  double dice = 0;
  for (int n = 0; n < 2; ++n) {
    for (int k = 1; k < 4; ++k) {
      const auto truth = (labels[n][0] == k).to(torch::kFloat);
      const auto both = (probabilities[n][k] * truth).sum().item<double>();
      const auto sum = (probabilities[n][k].sum() + truth.sum()).item<double>();
      dice += (2 * both + 1) / (sum + 1) / 6;
    }
  }
  EXPECT_NEAR(segmentation_loss(logits, labels).item<double>(), cross_entropy + 1 - dice, 1e-5);
}

TEST(SegmentationLossTest, TwoClassesEqualASoftmaxOfTwoLogits) {
  // softmax([0, x]) is [1 - sigmoid(x), sigmoid(x)]
  torch::manual_seed(2);
  const auto logit = torch::randn({3, 1, 4, 4});
  const auto labels = torch::randint(2, {3, 1, 4, 4}).to(torch::kByte);
  const auto both = torch::cat({torch::zeros_like(logit), logit}, 1);
  EXPECT_NEAR(segmentation_loss(logit, labels).item<double>(), segmentation_loss(both, labels).item<double>(), 1e-5);
  EXPECT_TRUE(torch::allclose(to_probabilities(logit), to_probabilities(both), 1e-5, 1e-6));
  EXPECT_TRUE(torch::equal(to_labels(to_probabilities(logit)), (logit > 0).to(torch::kByte)));
}

// GPipe::step() computes the loss per micro-batch.
TEST(SegmentationLossTest, LossDecomposesOverUnequalMicroBatches) {
  torch::manual_seed(3);
  for (const int channels : {1, 4}) {
    const auto logits = torch::randn({7, channels, 5, 6});
    const auto labels = torch::randint(std::max(2, channels), {7, 1, 5, 6}).to(torch::kByte);
    const auto check = check_loss(tensor_loss(segmentation_loss), logits, labels, /*chunks=*/3);
    EXPECT_NEAR(check.from_micro_batches, check.whole, 1e-6);
  }
}

TEST(SegmentationTest, PaintsClassesInTheirColours) {
  auto labels = torch::zeros({1, 1, 1, 3}, torch::kByte);
  labels[0][0][0][1] = 1;
  labels[0][0][0][2] = 2;
  const auto three = (paint(one_hot(labels, 3)) * 255).to(torch::kByte);
  EXPECT_TRUE(torch::equal(three[0][0][0], torch::tensor({0, 128, 0}).to(torch::kByte)));
  EXPECT_TRUE(torch::equal(three[0][1][0], torch::tensor({0, 0, 128}).to(torch::kByte)));
  auto share = torch::zeros({1, 2, 1, 1});
  share[0][0] = 0.75;
  share[0][1] = 0.25;
  EXPECT_TRUE(torch::equal(paint(share), torch::full({1, 3, 1, 1}, 0.25)));
}

TEST(ModelOptionsTest, OptionsAreStoredAsFlags) {
  const ModelOptions options{.classes = 5, .depth = 2, .channels = 6, .bilinear = true};
  auto flags = to_flags(options);
  EXPECT_EQ(to_flags(from_flags(flags)), flags);
  EXPECT_EQ(make_model(from_flags(flags))->forward(torch::zeros({1, 3, 16, 16})).size(1), 5);
  EXPECT_EQ(make_model({})->forward(torch::zeros({1, 3, 16, 16})).size(1), 1);
  flags["--depth"] = "many";
  EXPECT_THAT(error_of<std::invalid_argument>([&] { from_flags(flags); }), HasSubstr("--depth is many"));
  flags.erase("--depth");
  EXPECT_THAT(error_of<std::invalid_argument>([&] { from_flags(flags); }), HasSubstr("--depth"));
}

}  // namespace
}  // namespace gpipe::examples::unet
