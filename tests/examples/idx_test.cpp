#include "examples/resnet18_mnist/idx.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/examples/fixtures.h"

namespace gpipe::examples::mnist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

LabelledImages three_images() {
  LabelledImages set{.size = {2, 3}, .pixels = {}, .labels = {7, 0, 9}};
  for (int i = 0; i < 18; ++i) set.pixels.push_back(static_cast<uint8_t>(i * 15));
  return set;
}

class IdxTest : public ::testing::Test {
 protected:
  IdxTest() { write_idx(files_, three_images()); }

  // Overwrites bytes of a file.
  static void patch(const std::filesystem::path& path, size_t offset, const std::vector<uint8_t>& values) {
    auto bytes = read_bytes(path);
    std::copy(values.begin(), values.end(), bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    write_file(path, bytes);
  }
  std::string message() const {
    return error_of([this] { read_idx(files_); });
  }

  const TemporaryDirectory directory_;
  const IdxFiles files_ = training_files(directory_.path());
};

TEST_F(IdxTest, FormatIsThatOfMnist) {
  EXPECT_EQ(read_bytes(directory_ / "train-labels-idx1-ubyte"),
            (std::vector<uint8_t>{0, 0, 8, 1, 0, 0, 0, 3, 7, 0, 9}));
  const auto images = read_bytes(directory_ / "train-images-idx3-ubyte");
  ASSERT_EQ(images.size(), 16u + 18u);
  EXPECT_EQ(std::vector<uint8_t>(images.begin(), images.begin() + 18),
            (std::vector<uint8_t>{0, 0, 8, 3, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0, 2, 0, 15}));
}

TEST_F(IdxTest, WrittenFilesAreReadBack) {
  const auto set = read_idx(files_);
  EXPECT_EQ(set.size, (Size{2, 3}));
  EXPECT_EQ(set.count(), 3u);
  EXPECT_EQ(set.pixels, three_images().pixels);
  EXPECT_EQ(set.labels, three_images().labels);
}

TEST_F(IdxTest, PartsHaveSeparateFiles) {
  const auto test = test_files(directory_.path());
  EXPECT_EQ(test.images, directory_ / "t10k-images-idx3-ubyte");
  EXPECT_EQ(test.labels, directory_ / "t10k-labels-idx1-ubyte");
}

TEST_F(IdxTest, FileOfAnotherKindIsNamed) {
  patch(files_.images, 3, {1});
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.images.string()), HasSubstr("0x00000801"), HasSubstr("0x00000803")));
  write_idx(files_, three_images());
  patch(files_.labels, 2, {0x0d});
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.labels.string()), HasSubstr("labels"), HasSubstr("0x00000d01")));
}

TEST_F(IdxTest, TruncatedFileIsNamed) {
  for (const size_t length : {33u, 16u}) {
    cut(files_.images, length);
    EXPECT_THAT(message(),
                AllOf(HasSubstr(files_.images.string()), HasSubstr("truncated"),
                      HasSubstr(std::to_string(length - 16) + " bytes after the header, which announces 18")));
  }
  cut(files_.images, 15);
  EXPECT_THAT(message(), AllOf(HasSubstr("truncated: 15 bytes"), HasSubstr("header alone has 16")));
  cut(files_.images, 0);
  EXPECT_THAT(message(), HasSubstr("empty"));
}

TEST_F(IdxTest, TooLongFileIsNamed) {
  auto bytes = read_bytes(files_.labels);
  bytes.push_back(1);
  write_file(files_.labels, bytes);
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.labels.string()), HasSubstr("too long")));
}

TEST_F(IdxTest, ImpossibleSizesAreRefusedBeforeAllocating) {
  patch(files_.images, 4, {255, 255, 255, 255});
  EXPECT_THAT(message(), HasSubstr("truncated"));
  patch(files_.images, 8, {255, 255, 255, 255, 255, 255, 255, 255});
  EXPECT_THAT(message(), HasSubstr("4294967295 rows"));
  patch(files_.images, 8, {0, 0, 0, 0});
  EXPECT_THAT(message(), HasSubstr("0 rows"));
  patch(files_.images, 4, {0, 0, 0, 0});
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.images.string()), HasSubstr("no items")));
}

TEST_F(IdxTest, ProductOfSizesDoesNotOverflow) {
  patch(files_.images, 4, {255, 255, 255, 255, 0, 0, 16, 0, 0, 0, 16, 0});
  EXPECT_THAT(message(), HasSubstr("18 bytes after the header, which announces 72057594021150720"));
  patch(files_.images, 4, {0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1});
  EXPECT_THAT(message(), HasSubstr("18 bytes after the header, which announces 4294967296"));
}

// The files are sparse: they take no space, and are larger than any memory.
TEST_F(IdxTest, FileOfTheWrongLengthIsNotRead) {
  std::filesystem::resize_file(files_.images, std::uintmax_t{1} << 42);
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.images.string()), HasSubstr("too long: 4398046511088 bytes")));
  write_idx(files_, three_images());
  std::filesystem::resize_file(files_.labels, std::uintmax_t{1} << 42);
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.labels.string()), HasSubstr("too long")));
}

TEST_F(IdxTest, EndlessFileIsRefused) {
  std::filesystem::remove(files_.images);
  std::filesystem::create_symlink("/dev/zero", files_.images);
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.images.string()), HasSubstr("cannot be opened")));
}

TEST_F(IdxTest, DifferentCountsNameBothFiles) {
  write_file(files_.labels, {0, 0, 8, 1, 0, 0, 0, 2, 7, 0});
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.images.string() + " has 3 images"),
                               HasSubstr(files_.labels.string() + " has 2 labels")));
}

TEST_F(IdxTest, LabelsMustBeClasses) {
  patch(files_.labels, 9, {10});
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.labels.string()), HasSubstr("label 1 is 10")));
  EXPECT_NO_THROW(read_idx(files_, 11));
}

TEST_F(IdxTest, MissingAndCompressedFilesAreNamed) {
  write_file(directory_ / "train-labels-idx1-ubyte", {0x1f, 0x8b, 8, 0, 0});
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.labels.string()), HasSubstr("gunzip")));
  std::filesystem::rename(files_.labels, files_.labels.string() + ".gz");
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.labels.string() + ":"), HasSubstr("run gunzip")));
  std::filesystem::remove(files_.images);
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.images.string()), HasSubstr("No such file")));
  std::filesystem::create_directory(files_.images);
  EXPECT_THAT(message(), AllOf(HasSubstr(files_.images.string()), HasSubstr("directory")));
}

TEST_F(IdxTest, RefusesToWriteMismatchedParts) {
  auto set = three_images();
  set.labels.pop_back();
  EXPECT_THAT(error_of<std::invalid_argument>([&] { write_idx(files_, set); }),
              HasSubstr("18 pixels are not 2 images"));
  EXPECT_THROW(write_idx(files_, {}), std::invalid_argument);
  EXPECT_EQ(read_idx(files_).count(), 3u);
  EXPECT_THAT(error_of([&] { write_idx(training_files(directory_ / "absent"), three_images()); }),
              HasSubstr((directory_ / "absent").string()));
}

}  // namespace
}  // namespace gpipe::examples::mnist
