#include "examples/unet/carvana.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "examples/common/image.h"
#include "tests/examples/fixtures.h"

namespace gpipe::examples::unet {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class CarvanaTest : public ::testing::Test {
 protected:
  CarvanaTest() {
    std::filesystem::create_directory(directory_ / "imgs");
    std::filesystem::create_directory(directory_ / "masks");
  }

  std::filesystem::path image(const std::string& name, Size size = {32, 24}) {
    const auto path = directory_ / "imgs" / name;
    write_jpeg(path, Image(size, 3));
    return path;
  }
  std::filesystem::path mask(const std::string& name, Size size = {32, 24}) {
    const auto path = directory_ / "masks" / name;
    write_gif(path, Image(size, 1));
    return path;
  }
  std::string message() {
    return error_of([this] { list_samples(directory_.path()); });
  }

  const TemporaryDirectory directory_;
};

TEST_F(CarvanaTest, PairsImagesWithMasksInOrder) {
  const auto c = image("c.JPG");
  const auto c_mask = mask("c_mask.gif");
  const auto a = image("a_mask.jpeg");
  const auto a_mask = mask("a_mask_mask.png");
  const auto b = image("b.v2.png", {8, 9});
  const auto b_mask = mask("b.v2_mask.GIF", {8, 9});
  write_text(directory_ / "imgs" / "notes.txt", "not a picture, and not read");

  const auto samples = list_samples(directory_.path());
  ASSERT_EQ(samples.size(), 3u);
  EXPECT_EQ(samples[0].image, a);
  EXPECT_EQ(samples[0].mask, a_mask);
  EXPECT_EQ(samples[1].image, b);
  EXPECT_EQ(samples[1].mask, b_mask);
  EXPECT_EQ(samples[2].image, c);
  EXPECT_EQ(samples[2].mask, c_mask);
}

TEST_F(CarvanaTest, MissingFolderIsNamed) {
  image("a.jpg");
  std::filesystem::remove(directory_ / "masks");
  EXPECT_THAT(message(), AllOf(HasSubstr((directory_ / "masks").string()), HasSubstr("No such file")));
}

TEST_F(CarvanaTest, EmptyFolderIsNamed) {
  EXPECT_THAT(message(), AllOf(HasSubstr((directory_ / "imgs").string()), HasSubstr("no .jpg")));
}

TEST_F(CarvanaTest, ImagesWithoutMasksAreNamed) {
  image("a.jpg");
  mask("a_mask.gif");
  for (const char* name : {"s1.jpg", "s2.jpg", "s3.jpg", "s4.jpg", "s5.jpg", "s6.jpg", "s7.jpg"}) image(name);
  EXPECT_THAT(message(), HasSubstr("no mask (<image>_mask.gif or .png) for: s1, s2, s3, s4, s5 and 2 more"));
}

TEST_F(CarvanaTest, MasksWithoutImagesAreNamed) {
  image("a.jpg");
  mask("a_mask.gif");
  mask("alone_mask.gif");
  EXPECT_THAT(message(), AllOf(HasSubstr("no image"), HasSubstr("alone"), Not(HasSubstr("more"))));
}

TEST_F(CarvanaTest, MaskWithoutSuffixIsNamed) {
  image("a.jpg");
  const auto path = mask("a.gif");
  EXPECT_THAT(message(), AllOf(HasSubstr(path.string()), HasSubstr("_mask.gif")));
}

TEST_F(CarvanaTest, FilesWithTheSameStemAreNamed) {
  const auto jpg = image("a.jpg");
  const auto png = image("a.png");
  mask("a_mask.gif");
  EXPECT_THAT(message(), AllOf(HasSubstr(jpg.string()), HasSubstr(png.string())));
}

TEST_F(CarvanaTest, DifferentSizesNameBothFiles) {
  const auto a = image("a.jpg", {32, 24});
  const auto a_mask = mask("a_mask.gif", {32, 25});
  EXPECT_THAT(message(), AllOf(HasSubstr(a.string() + " is 32x24"), HasSubstr(a_mask.string() + " is 32x25")));
}

TEST_F(CarvanaTest, FileThatIsNotAnImageIsNamed) {
  const auto path = image("a.jpg");
  mask("a_mask.gif");
  write_text(path, "not a picture");
  EXPECT_THAT(message(), AllOf(HasSubstr(path.string()), HasSubstr("not a JPEG")));
}

std::vector<Sample> numbered(int count) {
  std::vector<Sample> samples;
  for (int i = 0; i < count; ++i) samples.push_back({std::to_string(i), "m" + std::to_string(i)});
  return samples;
}

std::vector<std::string> names(const std::vector<Sample>& samples) {
  std::vector<std::string> result;
  for (const auto& sample : samples) result.push_back(sample.image.string());
  return result;
}

TEST(SplitTest, EachSampleIsInOnePart) {
  const auto parts = split(numbered(50), 10, 1);
  EXPECT_EQ(parts.validation.size(), 5u);
  EXPECT_EQ(parts.training.size(), 45u);
  auto all = names(parts.training);
  const auto validation = names(parts.validation);
  all.insert(all.end(), validation.begin(), validation.end());
  EXPECT_EQ(std::set<std::string>(all.begin(), all.end()).size(), 50u);
}

TEST(SplitTest, DependsOnTheSeedOnly) {
  const auto samples = numbered(50);
  EXPECT_EQ(names(split(samples, 20, 3).validation), names(split(samples, 20, 3).validation));
  EXPECT_NE(names(split(samples, 20, 3).validation), names(split(samples, 20, 4).validation));
}

TEST(SplitTest, NoPartIsEmpty) {
  EXPECT_EQ(split(numbered(2), 1, 0).validation.size(), 1u);
  EXPECT_EQ(split(numbered(3), 99, 0).training.size(), 1u);
}

TEST(SplitTest, ZeroPercentKeepsAllForTraining) {
  const auto parts = split(numbered(1), 0, 0);
  EXPECT_EQ(parts.training.size(), 1u);
  EXPECT_TRUE(parts.validation.empty());
}

TEST(SplitTest, RefusesInvalidArguments) {
  EXPECT_THAT(error_of<std::invalid_argument>([] { split(numbered(1), 10, 0); }), HasSubstr("cannot split 1 sample"));
  for (const double percent : {-1.0, 100.0}) {
    EXPECT_THAT(error_of<std::invalid_argument>([&] { split(numbered(9), percent, 0); }),
                HasSubstr("the validation percentage must be at least 0 and below 100"));
  }
}

}  // namespace
}  // namespace gpipe::examples::unet
