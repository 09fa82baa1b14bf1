#include "examples/common/image.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "tests/examples/fixtures.h"

namespace gpipe::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Smooth, so that JPEG keeps it well.
Image gradient(Size size) {
  Image image(size, 3);
  for (int y = 0; y < size.height; ++y) {
    for (int x = 0; x < size.width; ++x) {
      uint8_t* pixel = image.at(x, y);
      pixel[0] = static_cast<uint8_t>(255 * x / size.width);
      pixel[1] = static_cast<uint8_t>(255 * y / size.height);
      pixel[2] = 128;
    }
  }
  return image;
}

Image checkers(Size size) {
  Image mask(size, 1);
  for (int y = 0; y < size.height; ++y) {
    for (int x = 0; x < size.width; ++x) *mask.at(x, y) = (x / 3 + y / 2) % 2;
  }
  return mask;
}

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

TEST(ImageTest, MasksKeepEveryPixelInGifAndPng) {
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

TEST(ImageTest, MaskThresholdLiesAboveLuminance127) {
  const TemporaryDirectory directory;
  Image grey({2, 1}, 1);
  grey.pixels = {127, 128};
  write_png(directory / "a.png", grey);
  EXPECT_EQ(read_mask(directory / "a.png").pixels, (std::vector<uint8_t>{0, 1}));
}

TEST(ImageTest, AMaskOfZerosAndOnesIsWhatItSays) {
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

// The canvas is 4x3; the frame covers 2x1 of it at (1, 2), and a pixel of it lies outside where `left` is 3.
std::string small_frame_gif(char left) {
  std::string gif = "GIF89a";
  gif += std::string("\x04\0\x03\0\x80\0\0", 7);  // canvas, palette of two
  gif += std::string("\0\0\0\xff\xff\xff", 6);    // black, white
  gif += std::string(",") + left + std::string("\0\x02\0\x02\0\x01\0\0", 8);
  gif += std::string("\x02\x02\x4c\x0a\0;", 6);  // LZW: clear, 1, 1, end
  return gif;
}

TEST(ImageTest, GifFrameSmallerThanItsCanvas) {
  const TemporaryDirectory directory;
  write_text(directory / "a.gif", small_frame_gif(1));
  EXPECT_EQ(read_mask(directory / "a.gif").pixels, (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0}));
  write_text(directory / "a.gif", small_frame_gif(3));
  EXPECT_EQ(read_mask(directory / "a.gif").pixels, (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}));
}

TEST(ImageTest, ReadsAtTheWantedSize) {
  const TemporaryDirectory directory;
  write_jpeg(directory / "a.jpg", gradient({200, 120}), 95);
  write_png(directory / "a.png", gradient({200, 120}));
  for (const char* name : {"a.jpg", "a.png"}) {
    // Around the steps of scaled decoding (25x15 is 1/8), odd ones between, the whole, and above it.
    for (const Size size : {Size{25, 15}, Size{26, 15}, Size{50, 30}, Size{67, 41}, Size{200, 120}, Size{220, 130}}) {
      const Image image = read_image(directory / name, size);
      EXPECT_EQ(image.size(), size);
      EXPECT_LE(largest_difference(image, gradient(size)), 12) << name << " at " << to_string(size);
    }
  }
}

TEST(ImageTest, ScaledMasksTakeTheNearestPixel) {
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

TEST(ImageTest, ResizeRefusesNothingness) {
  EXPECT_THROW(resize_bilinear(Image({2, 2}, 3), {0, 2}), std::invalid_argument);
  EXPECT_THROW(resize_nearest(Image(), {2, 2}), std::invalid_argument);
}

TEST(SizeTest, IsReadAsItIsWritten) {
  EXPECT_EQ(to_size("1918x1280"), (Size{1918, 1280}));
  EXPECT_EQ(to_size(to_string({3, 4})), (Size{3, 4}));
  for (const auto* text : {"", "192", "192x", "0x128", "192x-1", "192x128x3", "192x128 ", "999999x1"}) {
    EXPECT_THROW(to_size(text), std::invalid_argument) << text;
  }
}

TEST(ImageTest, ScaledSizeIsRoundedAndNeverEmpty) {
  EXPECT_EQ(scaled({1918, 1280}, 0.5), (Size{959, 640}));
  EXPECT_EQ(scaled({10, 3}, 0.1), (Size{1, 1}));
  EXPECT_EQ(scaled({10, 3}, 1), (Size{10, 3}));
  for (const double scale : {0.0, -1.0, 1.5}) EXPECT_THROW(scaled({10, 10}, scale), std::invalid_argument);
}

// What is read from a damaged file of each format, at every eighth of its length.
TEST(ImageTest, TruncatedFilesAreErrorsThatNameThem) {
  const TemporaryDirectory directory;
  const auto write = [&](const std::string& name) {
    const auto path = directory / name;
    if (name == "a.jpg") write_jpeg(path, gradient({96, 64}));
    if (name == "a.png") write_png(path, gradient({96, 64}));
    if (name == "a.gif") write_gif(path, checkers({96, 64}));
    return path;
  };
  for (const char* name : {"a.jpg", "a.png", "a.gif"}) {
    for (int eighths = 1; eighths < 8; ++eighths) {
      const auto path = write(name);
      cut(path, std::filesystem::file_size(path) * static_cast<size_t>(eighths) / 8);
      EXPECT_THAT(error_of([&] { read_image(path); }), HasSubstr(path.string() + ": ")) << eighths << "/8";
      EXPECT_THAT(error_of([&] { read_mask(path, {24, 16}); }), HasSubstr(path.string() + ": ")) << eighths << "/8";
    }
  }
}

TEST(ImageTest, TruncatedHeadersAreErrorsOfImageSize) {
  const TemporaryDirectory directory;
  write_jpeg(directory / "a", gradient({96, 64}));
  write_png(directory / "b", gradient({96, 64}));
  write_gif(directory / "c", checkers({96, 64}));
  for (const char* name : {"a", "b", "c"}) {
    cut(directory / name, 9);
    EXPECT_THAT(error_of([&] { image_size(directory / name); }), HasSubstr((directory / name).string() + ": "));
  }
}

TEST(ImageTest, FilesThatAreNoImages) {
  const TemporaryDirectory directory;
  write_text(directory / "text.jpg", "this is no picture");
  write_text(directory / "empty.png", "");
  const auto message = [&](const char* name) { return error_of([&] { image_size(directory / name); }); };
  EXPECT_THAT(message("text.jpg"), AllOf(HasSubstr("text.jpg"), HasSubstr("not a JPEG, PNG or GIF")));
  EXPECT_THAT(message("empty.png"), AllOf(HasSubstr("empty.png"), HasSubstr("is empty")));
  EXPECT_THAT(message("absent.png"), AllOf(HasSubstr("absent.png"), HasSubstr("No such file")));
  EXPECT_THAT(error_of([&] { read_image(directory.path()); }), HasSubstr("directory"));
}

TEST(ImageTest, ContentDecidesTheFormat) {
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
