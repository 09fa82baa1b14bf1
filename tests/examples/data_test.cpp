// The data of the example programs: IDX files, drawn scenes, masks and mini-batches.

#include <ATen/ATen.h>
#include <torch/utils.h>

#include <set>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "examples/common/files.h"
#include "examples/resnet18_mnist/digits.h"
#include "examples/unet/data.h"
#include "examples/unet/segmentation.h"
#include "gpipe/loss.h"
#include "tests/support/matchers.h"

namespace gpipe::examples {
namespace {

// --- IDX

class IdxTest : public ::testing::Test {
 protected:
  // Writes a set with these files of images and labels, and returns why it is refused.
  std::string refused(const std::string& images, const std::string& labels) {
    write_file(directory_ / "train-images-idx3-ubyte", images);
    write_file(directory_ / "train-labels-idx1-ubyte", labels);
    return error_of([this] { mnist::read_idx(directory_.path(), "train"); });
  }

  const TemporaryDirectory directory_;
  const std::string images_{"\0\0\x8\x3\0\0\0\x3\0\0\0\x1\0\0\0\x2\0\xe\x1c\x2a\x38\x46", 22};
  const std::string labels_{"\0\0\x8\x1\0\0\0\x3\x7\0\x9", 11};
};

TEST_F(IdxTest, FormatIsThatOfMnist) {
  refused(images_, labels_);
  const auto set = mnist::read_idx(directory_.path(), "train");
  EXPECT_TRUE(at::equal(set.images, (at::arange(6) * 14).to(at::kByte).view({3, 1, 2})));
  EXPECT_TRUE(at::equal(set.labels, at::tensor({7, 0, 9}, at::kByte)));
}

TEST_F(IdxTest, DamagedFilesAreNamed) {
  const auto changed = [](std::string bytes, std::size_t at, const std::string& by) {
    return bytes.replace(at, by.size(), by);
  };
  EXPECT_THAT(refused(changed(images_, 3, "\x1"), labels_),
              AllOf(HasSubstr("train-images-idx3-ubyte"), HasSubstr("not an uncompressed IDX file of bytes in 3")));
  EXPECT_THAT(refused(images_, changed(labels_, 0, "\x1f\x8b")), HasSubstr("not an uncompressed IDX file"));
  EXPECT_THAT(refused(images_, changed(labels_, 9, "\xa")), HasSubstr("a label is 10; it must be below 10"));
  EXPECT_THAT(refused(images_.substr(0, 21), labels_), HasSubstr("5 bytes after the header, which announces 6"));
  EXPECT_THAT(refused(images_ + "!", labels_), HasSubstr("7 bytes after the header, which announces 6"));
  EXPECT_THAT(refused(images_.substr(0, 15), labels_), HasSubstr("not an uncompressed IDX file"));
  EXPECT_THAT(refused("", labels_), HasSubstr("not an uncompressed IDX file"));
  EXPECT_THAT(refused(images_, std::string("\0\0\x8\x1\0\0\0\x2\x7\0", 10)), HasSubstr("3 images and 2 labels"));
  // Products of sizes that exceed 64 bits, and sizes of 0.
  EXPECT_THAT(refused(changed(images_, 4, std::string(12, '\xff')), labels_),
              HasSubstr("bytes after the header, which announces 79228162"));
  EXPECT_THAT(refused(changed(images_, 4, std::string(4, '\0')), labels_),
              HasSubstr("bytes after the header, which announces"));
  std::filesystem::remove(directory_ / "train-images-idx3-ubyte");
  EXPECT_THAT(error_of([this] { mnist::read_idx(directory_.path(), "train"); }), HasSubstr("cannot be opened"));
}

// --- Scenes, masks and mini-batches

using unet::list_samples;

// A line has the bytes of a file of two pixels in base64, its name, the number of classes, and the classes of the pixels or
// an error. Python has the same test.
TEST(MaskTest, MasksHoldClasses) {
  const TemporaryDirectory directory;
  std::istringstream table(read_file(std::filesystem::path(__FILE__).parent_path() / "masks.txt"));
  int classes = 0;
  for (std::string data, name, expected;
       table >> data >> name >> classes && std::getline(table >> std::ws, expected);) {
    SCOPED_TRACE(name);
    std::string bytes;
    ASSERT_TRUE(absl::Base64Unescape(data, &bytes));
    write_file(directory / name, bytes);
    const auto found = error_of([&] {
      const auto labels = unet::read_labels(directory / name, classes).flatten();
      ASSERT_EQ(labels.numel(), 2);
      throw std::runtime_error(absl::StrCat(labels[0].item<int>(), " ", labels[1].item<int>()));
    });
    EXPECT_THAT(found, HasSubstr(expected));
  }
}

TEST(MaskTest, MasksOfOneClassAreRefused) {
  const TemporaryDirectory directory;
  std::vector<unet::Sample> samples;
  for (const auto* name : {"a_mask.png", "b_mask.png"}) samples.push_back({.image = {}, .mask = directory / name});
  const auto write = [&](int value, std::size_t which) {
    write_png(samples[which].mask, at::full({3, 5}, value, at::kByte));
  };
  write(0, 0);
  write(0, 1);
  EXPECT_THAT(error_of([&] { unet::check_masks(samples, 2); }),
              AllOf(HasSubstr(directory.path().string()), HasSubstr("all pixels of all masks are of class 0")));
  write(1, 1);
  unet::check_masks(samples, 2);
  write(9, 0);
  EXPECT_THAT(error_of([&] { unet::check_masks(samples, 3); }), HasSubstr("9,9,9"));
}

class LoaderTest : public ::testing::Test {
 protected:
  LoaderTest() {
    unet::write_scenes(directory_.path(), 11, {48, 32}, 3, 2);
    samples_ = list_samples(directory_.path());
  }

  const TemporaryDirectory directory_;
  std::vector<unet::Sample> samples_;
};

TEST_F(LoaderTest, BatchesHoldTheFiles) {
  const auto all = unet::read_samples(samples_, {48, 32}, 2);
  EXPECT_EQ(all.input.sizes(), at::IntArrayRef({11, 3, 32, 48}));
  const auto scene = unet::draw_scene(3, 5, {48, 32});
  EXPECT_TRUE(at::equal(all.input[5], scene.image.to(at::kFloat) / 255));
  EXPECT_TRUE(at::equal(all.target[5][0], scene.mask));
  EXPECT_EQ(unet::read_samples(samples_, {24, 16}, 2).target.sizes(), at::IntArrayRef({11, 1, 16, 24}));
  for (auto& sample : samples_) sample.mask.clear();
  EXPECT_EQ(unet::read_samples(samples_, {48, 32}, 2).target.sum().item<int>(), 0);
}

TEST_F(LoaderTest, HiddenFilesAreNoSamples) {
  write_file(directory_ / "imgs" / "._000.jpg", "of macOS");
  write_file(directory_ / "imgs" / "Thumbs.db", "of Windows");
  EXPECT_EQ(list_samples(directory_.path()).size(), samples_.size());
}

TEST_F(LoaderTest, FilesThatDoNotPairAreNamed) {
  for (const auto& [name, why] :
       {std::pair("imgs/0007.jpg", "two files have the same stem"),
        std::pair("masks/0007.png", "the name of a mask must be <image>_mask"),
        std::pair("masks/0099_mask.png", "has no image"), std::pair("imgs/0099.png", "has no mask")}) {
    const auto path = directory_ / name;
    std::filesystem::copy_file(samples_[7].image, path);
    EXPECT_THAT(error_of([&] { list_samples(directory_.path()); }), AllOf(HasSubstr(path.string()), HasSubstr(why)));
    std::filesystem::remove(path);
  }
  EXPECT_THAT(error_of([&] { list_samples(directory_ / "none"); }), HasSubstr("cannot read the folder"));
}

TEST_F(LoaderTest, EachSampleIsInOnePart) {
  const auto parts = unet::split(samples_, 20, 3);
  EXPECT_EQ(parts.validation.size(), 2u);
  std::set<std::filesystem::path> images;
  for (const auto& part : {parts.training, parts.validation}) {
    for (const auto& sample : part) images.insert(sample.image);
  }
  EXPECT_EQ(images.size(), 11u);
  EXPECT_EQ(unet::split(samples_, 20, 3).validation[0].image, parts.validation[0].image);
  EXPECT_EQ(unet::split(samples_, 0.1, 3).validation.size(), 1u);
  EXPECT_THROW(unet::split({samples_[0]}, 10, 0), std::invalid_argument);
}

// --- The loss and the scores

TEST(SegmentationTest, LossIsCrossEntropyAndDice) {
  torch::manual_seed(1);
  const auto logits = torch::randn({2, 4, 5, 6});
  const auto labels = torch::randint(4, {2, 1, 5, 6}).to(torch::kByte);
  const auto probabilities = logits.softmax(1);
  const auto truth = unet::one_hot(labels, 4);
  const auto cross_entropy = -(probabilities.log() * truth).sum(1).mean();
  const auto things = probabilities.narrow(1, 1, 3), true_things = truth.narrow(1, 1, 3);
  const auto both = (things * true_things).sum({2, 3}), sum = (things + true_things).sum({2, 3});
  const auto dice = ((2 * both + 1) / (sum + 1)).mean();
  EXPECT_NEAR(unet::segmentation_loss(logits, labels).item<double>(), (cross_entropy + 1 - dice).item<double>(), 1e-5);
}

}  // namespace
}  // namespace gpipe::examples
