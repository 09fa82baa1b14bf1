#include "examples/common/image.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "tests/examples/fixtures.h"
#include "tests/examples/test_images.h"

namespace gpipe::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

int largest_difference(const Image& a, const Image& b) {
  EXPECT_EQ(a.size(), b.size());
  EXPECT_EQ(a.pixels.size(), b.pixels.size());
  int largest = 0;
  for (size_t i = 0; i < std::min(a.pixels.size(), b.pixels.size()); ++i) {
    largest = std::max(largest, std::abs(a.pixels[i] - b.pixels[i]));
  }
  return largest;
}

TEST(ImageTest, PngKeepsColorsExactly) {
  const TemporaryDirectory directory;
  const Image image = gradient({37, 23});
  write_png(directory / "a.png", image);
  EXPECT_EQ(image_size(directory / "a.png"), (Size{37, 23}));
  EXPECT_EQ(read_image(directory / "a.png").pixels, image.pixels);
}

TEST(ImageTest, GreyPngReadsAsEqualChannels) {
  const TemporaryDirectory directory;
  Image grey({5, 4}, 1);
  *grey.at(3, 2) = 77;
  write_png(directory / "a.png", grey);
  const Image image = read_image(directory / "a.png");
  EXPECT_EQ(image.channels, 3);
  EXPECT_EQ(std::vector<uint8_t>(image.at(3, 2), image.at(3, 2) + 3), std::vector<uint8_t>(3, 77));
}

// Transparent pixels keep their colour, as with Pillow's convert("RGB").
TEST(ImageTest, AlphaChannelOfPngIsIgnored) {
  const TemporaryDirectory directory;
  // Made with Pillow: (10, 20, 30) opaque, (200, 100, 50) transparent, (200, 100, 50) half transparent.
  write_file(directory / "rgba.png",
             {0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d, 0x49, 0x48, 0x44, 0x52,
              0x00, 0x00, 0x00, 0x03, 0x00, 0x00, 0x00, 0x01, 0x08, 0x06, 0x00, 0x00, 0x00, 0x1b, 0xe0, 0x14,
              0xb4, 0x00, 0x00, 0x00, 0x15, 0x49, 0x44, 0x41, 0x54, 0x78, 0x9c, 0x63, 0xe4, 0x12, 0x91, 0xfb,
              0xbf, 0x2f, 0x40, 0x84, 0x91, 0x81, 0x81, 0xa1, 0x01, 0x00, 0x14, 0xae, 0x02, 0xe0, 0xc2, 0x96,
              0x45, 0xc9, 0x00, 0x00, 0x00, 0x00, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82});
  EXPECT_EQ(read_image(directory / "rgba.png").pixels, (std::vector<uint8_t>{10, 20, 30, 200, 100, 50, 200, 100, 50}));
  // Grey 10 opaque, grey 200 transparent.
  write_file(
      directory / "grey.png",
      {0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d, 0x49, 0x48, 0x44, 0x52, 0x00, 0x00,
       0x00, 0x02, 0x00, 0x00, 0x00, 0x01, 0x08, 0x04, 0x00, 0x00, 0x00, 0x5e, 0x2b, 0xb7, 0x01, 0x00, 0x00, 0x00,
       0x0d, 0x49, 0x44, 0x41, 0x54, 0x78, 0x9c, 0x63, 0xe0, 0xfa, 0x7f, 0x82, 0x01, 0x00, 0x04, 0xba, 0x01, 0xd2,
       0xa1, 0x11, 0x5f, 0xa8, 0x00, 0x00, 0x00, 0x00, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82});
  EXPECT_EQ(read_image(directory / "grey.png").pixels, (std::vector<uint8_t>{10, 10, 10, 200, 200, 200}));
}

TEST(ImageTest, JpegKeepsColorsNearly) {
  const TemporaryDirectory directory;
  const Image image = gradient({64, 48});
  write_jpeg(directory / "a.jpg", image, 95);
  EXPECT_EQ(image_size(directory / "a.jpg"), (Size{64, 48}));
  EXPECT_LE(largest_difference(read_image(directory / "a.jpg"), image), 12);
}

TEST(ImageTest, GreyJpegReadsAsEqualChannels) {
  const TemporaryDirectory directory;
  Image grey({16, 16}, 1);
  std::fill(grey.pixels.begin(), grey.pixels.end(), uint8_t{90});
  write_jpeg(directory / "a.jpg", grey);
  EXPECT_EQ(read_image(directory / "a.jpg").pixels, std::vector<uint8_t>(3 * 16 * 16, 90));
}

TEST(ImageTest, GifAndPngKeepMasksExactly) {
  const TemporaryDirectory directory;
  for (const Size size : {Size{1, 1}, Size{41, 19}, Size{300, 200}}) {
    const Image mask = checkers(size);
    write_gif(directory / "a.gif", mask);
    EXPECT_EQ(image_size(directory / "a.gif"), size);
    EXPECT_EQ(read_mask(directory / "a.gif").pixels, mask.pixels);

    Image white = mask;
    for (uint8_t& value : white.pixels) value *= 255;
    write_png(directory / "a.png", white);
    EXPECT_EQ(read_mask(directory / "a.png").pixels, mask.pixels);
  }
}

TEST(ImageTest, MaskThresholdIsAboveLuminance127) {
  const TemporaryDirectory directory;
  Image grey({2, 1}, 1);
  grey.pixels = {127, 128};
  write_png(directory / "a.png", grey);
  EXPECT_EQ(read_mask(directory / "a.png").pixels, (std::vector<uint8_t>{0, 1}));
}

TEST(ImageTest, MaskOfZerosAndOnesIsNotThresholded) {
  const TemporaryDirectory directory;
  Image grey({3, 1}, 1);
  grey.pixels = {0, 1, 0};
  write_png(directory / "a.png", grey);
  EXPECT_EQ(read_mask(directory / "a.png").pixels, grey.pixels);
}

TEST(ImageTest, GifHasAOneBitPalette) {
  const TemporaryDirectory directory;
  write_gif(directory / "a.gif", checkers({8, 8}));
  const auto bytes = read_bytes(directory / "a.gif");
  ASSERT_GT(bytes.size(), 19u);
  EXPECT_EQ(bytes[10] & 0x87, 0x80);  // a global palette of 2^(0 + 1) colours
  EXPECT_EQ(std::vector<uint8_t>(bytes.begin() + 13, bytes.begin() + 19),
            (std::vector<uint8_t>{0, 0, 0, 255, 255, 255}));
}

TEST(ImageTest, IsReadAtTheWantedSize) {
  const TemporaryDirectory directory;
  write_jpeg(directory / "a.jpg", gradient({200, 120}), 95);
  write_png(directory / "a.png", gradient({200, 120}));
  for (const char* name : {"a.jpg", "a.png"}) {
    // Steps of scaled decoding (25x15 is 1/8), sizes between them, the full size, and a larger one.
    for (const Size size : {Size{25, 15}, Size{26, 15}, Size{50, 30}, Size{67, 41}, Size{200, 120}, Size{220, 130}}) {
      const Image image = read_image(directory / name, size);
      EXPECT_EQ(image.size(), size);
      EXPECT_LE(largest_difference(image, gradient(size)), 12) << name << " at " << to_string(size);
    }
  }
}

TEST(ImageTest, MasksAreResizedByTheNearestPixel) {
  const TemporaryDirectory directory;
  Image mask({4, 4}, 1);
  *mask.at(3, 3) = 1;
  *mask.at(1, 1) = 1;
  write_gif(directory / "a.gif", mask);
  EXPECT_EQ(read_mask(directory / "a.gif", {2, 2}).pixels, (std::vector<uint8_t>{1, 0, 0, 1}));
  EXPECT_EQ(read_mask(directory / "a.gif", {1, 1}).pixels, (std::vector<uint8_t>{0}));
  EXPECT_EQ(read_mask(directory / "a.gif", {8, 4}).pixels,
            (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0,  //
                                  0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1}));
}

TEST(ImageTest, ShrinkingAveragesAllPixels) {
  Image stripes({64, 8}, 1);
  for (size_t i = 0; i < stripes.pixels.size(); ++i) stripes.pixels[i] = i % 2 == 0 ? 0 : 200;
  const Image small = resize_bilinear(stripes, {8, 1});
  for (const uint8_t value : small.pixels) EXPECT_NEAR(value, 100, 8);
}

TEST(ImageTest, ResizeRefusesEmptyImages) {
  EXPECT_THROW(resize_bilinear(Image({2, 2}, 3), {0, 2}), std::invalid_argument);
  EXPECT_THROW(resize_nearest(Image(), {2, 2}), std::invalid_argument);
}

TEST(SizeTest, TextIsReadBack) {
  EXPECT_EQ(to_size("1918x1280"), (Size{1918, 1280}));
  EXPECT_EQ(to_size(to_string({3, 4})), (Size{3, 4}));
  for (const auto* text : {"", "192", "192x", "0x128", "192x-1", "192x128x3", "192x128 ", "999999x1"}) {
    EXPECT_THROW(to_size(text), std::invalid_argument) << text;
  }
}

TEST(ImageTest, ScaledSizeIsRoundedAndNotEmpty) {
  EXPECT_EQ(scaled({1918, 1280}, 0.5), (Size{959, 640}));
  EXPECT_EQ(scaled({10, 3}, 0.1), (Size{1, 1}));
  EXPECT_EQ(scaled({10, 3}, 1), (Size{10, 3}));
  for (const double scale : {0.0, -1.0, 1.5}) EXPECT_THROW(scaled({10, 10}, scale), std::invalid_argument);
}

TEST(ImageTest, WritersRefuseImagesThatTheFormatCannotHold) {
  const TemporaryDirectory directory;
  const auto path = directory / "a";
  const auto expect_refused = [&](const Image& image, auto write) {
    EXPECT_THAT(error_of<std::invalid_argument>([&] { write(path, image); }), HasSubstr(path.string() + ": "));
    EXPECT_FALSE(std::filesystem::exists(path));
  };
  const auto jpeg = [](const auto& to, const Image& image) { write_jpeg(to, image); };
  Image short_of_pixels({4, 4}, 3);
  short_of_pixels.pixels.pop_back();
  for (const Image& image : {Image(), Image({4, 4}, 2), short_of_pixels}) {
    expect_refused(image, write_png);
    expect_refused(image, jpeg);
    expect_refused(image, write_gif);
  }
  expect_refused(Image({4, 4}, 3), write_gif);
  expect_refused(Image({65536, 1}, 1), write_gif);
  expect_refused(Image({65536, 1}, 1), write_png);
  expect_refused(Image({1, 65501}, 1), jpeg);
}

TEST(ImageTest, FilesThatAreNotImagesAreNamed) {
  const TemporaryDirectory directory;
  write_text(directory / "text.jpg", "this is not an image");
  write_text(directory / "empty.png", "");
  const auto message = [&](const char* name) { return error_of([&] { image_size(directory / name); }); };
  EXPECT_THAT(message("text.jpg"), AllOf(HasSubstr("text.jpg"), HasSubstr("not a JPEG, PNG or GIF")));
  EXPECT_THAT(message("empty.png"), AllOf(HasSubstr("empty.png"), HasSubstr("is empty")));
  EXPECT_THAT(message("absent.png"), AllOf(HasSubstr("absent.png"), HasSubstr("No such file")));
  EXPECT_THAT(error_of([&] { read_image(directory.path()); }), HasSubstr("directory"));
}

TEST(ImageTest, FormatIsDetectedByContent) {
  const TemporaryDirectory directory;
  const Image image = gradient({12, 12});
  write_png(directory / "really_a_png.jpg", image);
  EXPECT_EQ(read_image(directory / "really_a_png.jpg").pixels, image.pixels);
}

TEST(ImageTest, UnwritablePathIsNamed) {
  const TemporaryDirectory directory;
  const auto path = directory / "absent" / "a.png";
  EXPECT_THAT(error_of([&] {
                write_png(path, gradient({4, 4}));
              }),
              AllOf(HasSubstr(path.string()), HasSubstr("No such file")));
}

}  // namespace
}  // namespace gpipe::examples
