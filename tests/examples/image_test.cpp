#include "examples/common/image.h"

#include <ATen/ATen.h>

#include <sstream>

#include "absl/strings/escaping.h"
#include "examples/common/files.h"
#include "tests/support/matchers.h"

namespace gpipe::examples {
namespace {

class ImageTest : public ::testing::Test {
 protected:
  // Writes a file of images.txt, which has a name and bytes in base64 per line. "accepted" pictures have 11 x 9 pixels.
  std::filesystem::path picture(const std::string& name) {
    std::istringstream lines(read_file(std::filesystem::path(__FILE__).parent_path() / "images.txt"));
    std::string found, data, bytes;
    while (found != name && lines >> found >> data) continue;
    EXPECT_TRUE(found == name && absl::Base64Unescape(data, &bytes)) << name;
    write_file(directory_ / name, bytes);
    return directory_ / name;
  }
  at::Tensor read(const std::string& bytes) {
    write_file(path_, bytes);
    return read_image(path_);
  }
  std::string message_of(const std::string& bytes) {
    const auto message = error_of([&] { read(bytes); });
    EXPECT_THAT(message, HasSubstr(path_.string() + ": "));
    return message;
  }

  const TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_ / "a";
};

TEST_F(ImageTest, PngKeepsColoursAndGreyLevels) {
  const auto image = at::arange(3 * 23 * 37).remainder(251).to(at::kByte).view({3, 23, 37});
  write_png(path_, image);
  EXPECT_EQ(image_size(path_), (Size{37, 23}));
  EXPECT_TRUE(at::equal(read_image(path_), image));
  write_png(path_, image[1]);
  EXPECT_TRUE(at::equal(read_image(path_), image[1].expand({3, 23, 37})));
  const auto gamma = std::string("\0\0\0\4gAMA\0\1\x86\xa0\x31\xe8\x96\x5f", 16);
  EXPECT_TRUE(at::equal(read(read_file(path_).insert(33, gamma)), image[1].expand({3, 23, 37})));
}

TEST_F(ImageTest, JpegIsDecodedNoLargerThanNeeded) {
  const auto whole = read_image(picture("accepted.jpg"));
  EXPECT_EQ(whole.sizes(), at::IntArrayRef({3, 9, 11}));
  EXPECT_NEAR(whole[0][0][5].item<int>(), 33, 2);
  EXPECT_NEAR(whole[1][0][5].item<int>(), 226, 2);
  for (const Size size : {Size{5, 4}, Size{6, 5}, Size{11, 9}, Size{22, 18}}) {
    const auto image = read_image(picture("accepted.jpg"), size).to(at::kFloat);
    EXPECT_EQ(image.sizes(), at::IntArrayRef({3, size.height, size.width}));
    EXPECT_LT((image - resize_smoothly(whole, size)).abs().mean().item<double>(), 10) << to_string(size);
  }
}

TEST_F(ImageTest, CmykIsReadAsPillowDoes) {
  const auto image = read_image(picture("cmyk.jpg")).to(at::kInt);
  const auto corners = at::tensor({0, 0, 240, 230, 0, 141, 0, 140, 100, 143, 140, 38}).view({2, 2, 3});
  EXPECT_LE((image.slice(1, 0, 9, 8).slice(2, 0, 11, 10).permute({1, 2, 0}) - corners).abs().max().item<int>(), 2);
}

TEST_F(ImageTest, OrientationOfExifTurnsTheImage) {
  const auto whole = read_image(picture("accepted.jpg"));
  const auto jpeg = read_file(directory_ / "accepted.jpg");
  std::string exif(
      "\xff\xe1\0\x22"
      "Exif\0\0II*\0\x8\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0",
      36);
  const auto turned = whole.transpose(1, 2);
  const std::vector<at::Tensor> expected = {whole,  whole.flip(2),  whole.flip({1, 2}),  whole.flip(1),
                                            turned, turned.flip(2), turned.flip({1, 2}), turned.flip(1)};
  for (std::size_t orientation = 1; orientation <= 8; ++orientation) {
    exif[28] = static_cast<char>(orientation);
    const auto image = read(std::string(jpeg).insert(2, exif));
    EXPECT_TRUE(at::equal(image, expected[orientation - 1])) << orientation;
    EXPECT_EQ(image_size(path_), (Size{static_cast<int>(image.size(2)), static_cast<int>(image.size(1))}));
  }
  // Of a PNG, and big-endian. The checksum is wrong, so that libpng skips the chunk.
  const std::string chunk(
      "\0\0\0\x1a"
      "eXIfMM\0*\0\0\0\x8\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0\0\0\0\0",
      38);
  write_png(path_, at::tensor({1, 2, 3, 4, 5, 6}, at::kByte).view({2, 3}));
  const auto image = read(read_file(path_).insert(33, chunk));
  EXPECT_TRUE(at::equal(image[0].flatten(), at::tensor({4, 1, 5, 2, 6, 3}, at::kByte)));
}

TEST_F(ImageTest, ShrinkingAveragesAllPixelsAndNearestKeepsClasses) {
  const auto stripes = (at::arange(64).remainder(2) * 200).to(at::kByte).expand({3, 8, 64});
  EXPECT_LE((resize_smoothly(stripes, {8, 1}).to(at::kInt) - 100).abs().max().item<int>(), 8);
  auto mask = at::zeros({4, 4}, at::kByte);
  mask[3][3] = 1;
  mask[1][1] = 2;
  EXPECT_TRUE(at::equal(resize_nearest(mask, {2, 2}), at::tensor({2, 0, 0, 1}, at::kByte).view({2, 2})));
  EXPECT_EQ(resize_nearest(mask, {8, 4}).sum().item<int>(), 2 * mask.sum().item<int>());
}

TEST(SizeTest, TextIsReadBack) {
  EXPECT_EQ(to_size("1918x1280"), (Size{1918, 1280}));
  EXPECT_EQ(to_size(to_string({3, 4})), (Size{3, 4}));
  for (const auto* text : {"", "192", "192x", "0x128", "192x-1", "192x128x3", "192x128 ", "999999x1"}) {
    EXPECT_THROW(to_size(text), std::invalid_argument) << text;
  }
  EXPECT_EQ(scaled({1918, 1280}, 0.5), (Size{959, 640}));
  EXPECT_EQ(scaled({10, 3}, 0.1), (Size{1, 1}));
  for (const double scale : {0.0, -1.0, 1.5}) EXPECT_THROW(scaled({10, 10}, scale), std::invalid_argument);
}

TEST_F(ImageTest, FilesThatAreNotImagesAreNamed) {
  EXPECT_THAT(message_of("this is not an image"), HasSubstr("not a JPEG, PNG, GIF or TIFF"));
  EXPECT_THAT(message_of(""), HasSubstr("is empty"));
  // A tiny file can claim gigabytes of pixels.
  EXPECT_THAT(message_of(read_file(picture("huge.jpg"))), HasSubstr("65500x65500 pixels are too many"));
  EXPECT_THAT(error_of([&] { image_size(directory_ / "absent"); }),
              AllOf(HasSubstr("absent: "), HasSubstr("No such file")));
  EXPECT_THAT(error_of([&] { read_image(directory_.path()); }), HasSubstr("directory"));
  const auto image = at::zeros({2, 2}, at::kByte);
  EXPECT_THAT(error_of([&] { write_png(directory_ / "none" / "a", image); }), HasSubstr("No such file"));
}

TEST_F(ImageTest, TruncatedFilesAreNamed) {
  for (const auto* name : {"accepted.jpg", "accepted.png", "accepted.gif"}) {
    const auto whole = read_file(picture(name));
    EXPECT_EQ(read(whole).sizes(), at::IntArrayRef({3, 9, 11})) << name;
    for (std::size_t eighths = 1; eighths < 8; ++eighths) message_of(whole.substr(0, whole.size() * eighths / 8));
  }
}

}  // namespace
}  // namespace gpipe::examples
