#include "examples/common/image.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
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

// Of this process, in bytes.
size_t address_space() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
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

// Little-endian.
std::string word(int value) {
  return {static_cast<char>(static_cast<unsigned char>(value)), static_cast<char>(value >> 8)};
}

// Pixel data of codes of three bits: 0 to 3 are colours, 4 clears the table, 5 ends. Fewer than four codes may follow
// a 4, because they would grow.
std::string lzw(const std::vector<int>& codes) {
  uint64_t bits = 0;
  for (size_t i = 0; i < codes.size(); ++i) bits |= static_cast<uint64_t>(codes[i]) << (3 * i);
  std::string data;
  for (; bits != 0; bits >>= 8) data += static_cast<char>(bits);
  return "\x02" + std::string(1, static_cast<char>(data.size())) + data + '\0';
}

struct Frame {
  int left = 1;
  int top = 2;
  int width = 2;
  int height = 1;
  char flags = 0;  // of the image descriptor; 0x40 is interlaced, 0x80 a local palette of two
  std::string palette = {};
  std::string data = lzw({4, 1, 1, 5});
};

std::string to_gif(const Frame& frame) {
  return "," + word(frame.left) + word(frame.top) + word(frame.width) + word(frame.height) + frame.flags +
         frame.palette + frame.data;
}

const std::string kBlackAndWhite = std::string("\0\0\0\xff\xff\xff", 6);

std::string gif_header(Size canvas) {
  return "GIF89a" + word(canvas.width) + word(canvas.height) + std::string("\x80\0\0", 3) + kBlackAndWhite;
}

// The canvas is 4x3.
std::string small_gif(const Frame& frame) { return gif_header({4, 3}) + to_gif(frame) + ";"; }

class GifTest : public ::testing::Test {
 protected:
  std::vector<uint8_t> mask_of(const std::string& gif) {
    write_text(path_, gif);
    return read_mask(path_).pixels;
  }
  std::string message_of(const std::string& gif) {
    write_text(path_, gif);
    const auto message = error_of([&] { read_image(path_); });
    EXPECT_THAT(message, HasSubstr(path_.string() + ": "));
    return message;
  }

  const TemporaryDirectory directory_;
  const std::filesystem::path path_ = directory_ / "a.gif";
};

TEST_F(GifTest, AFrameSmallerThanItsCanvas) {
  EXPECT_EQ(mask_of(small_gif({})), (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0}));
}

TEST_F(GifTest, OnlyTheFirstFrameIsDrawn) {
  const std::string two = to_gif({}) + to_gif({.left = 0, .top = 0});
  EXPECT_EQ(mask_of(gif_header({4, 3}) + two + ";"), (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0}));
}

TEST_F(GifTest, AFrameOutsideItsCanvasIsClipped) {
  EXPECT_EQ(mask_of(small_gif({.left = 3})), (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}));
  EXPECT_EQ(mask_of(small_gif({.left = 4})), std::vector<uint8_t>(12, 0));
  EXPECT_EQ(mask_of(small_gif({.top = 3})), std::vector<uint8_t>(12, 0));
  EXPECT_EQ(mask_of(small_gif({.left = 65535, .top = 65535})), std::vector<uint8_t>(12, 0));
}

TEST_F(GifTest, InterlacedRowsComeInFourPasses) {
  // Rows 0, 4, 2, 1, 3 of one pixel.
  const auto data = lzw({4, 0, 0, 4, 0, 1, 4, 1, 5});
  EXPECT_EQ(mask_of(gif_header({1, 5}) + to_gif({0, 0, 1, 5, 0x40, {}, data}) + ";"),
            (std::vector<uint8_t>{0, 1, 0, 1, 0}));
}

TEST_F(GifTest, AFramesOwnPaletteComesFirst) {
  const std::string white_and_black("\xff\xff\xff\0\0\0", 6);
  EXPECT_EQ(mask_of(small_gif({.flags = '\x80', .palette = white_and_black})), std::vector<uint8_t>(12, 0));
}

TEST_F(GifTest, TransparentPixelsHaveTheirPalettesColour) {
  const std::string transparent_1("\x21\xf9\x04\x01\0\0\x01\0", 8);
  EXPECT_EQ(mask_of(gif_header({4, 3}) + transparent_1 + to_gif({}) + ";"), mask_of(small_gif({})));
}

TEST_F(GifTest, DamagedFramesAreErrors) {
  EXPECT_THAT(message_of(small_gif({.width = 0})), HasSubstr("first frame has no pixels"));
  EXPECT_THAT(message_of(small_gif({.height = 0})), HasSubstr("first frame has no pixels"));
  EXPECT_THAT(message_of(small_gif({.width = 3})), HasSubstr("Image EOF detected before image complete"));
  EXPECT_THAT(message_of(gif_header({4, 3}) + ";"), HasSubstr("no frame"));
  EXPECT_THAT(message_of("GIF89a" + word(4) + word(3) + std::string(3, '\0') + to_gif({}) + ";"),
              HasSubstr("no palette"));
  EXPECT_THAT(message_of(small_gif({.data = lzw({4, 3, 1, 5})})), HasSubstr("palette lacks"));
  EXPECT_THAT(message_of(small_gif({.data = lzw({4, 7, 1, 5})})), HasSubstr("defective"));
  EXPECT_THAT(message_of(small_gif({.data = std::string("\x09\x02\x4c\x0a\0", 5)})), HasSubstr("Failed to read"));
  EXPECT_THAT(message_of(gif_header({4, 3}) + to_gif({.data = ""})), HasSubstr("the GIF is damaged or cut short"));
  EXPECT_THAT(message_of(gif_header({4, 3}) + "?"), HasSubstr("Wrong record type"));
}

// A 64 KiB row at most is held of a frame that claims 4 GiB.
TEST_F(GifTest, AFrameIsNotHeldWhole) {
  EXPECT_THAT(message_of(small_gif({0, 0, 65535, 65535})), HasSubstr("Image EOF detected before image complete"));
  const auto huge = to_gif({.width = 65535, .height = 65535});
  EXPECT_EQ(mask_of(gif_header({4, 3}) + to_gif({}) + huge + huge + ";"), mask_of(small_gif({})));
}

TEST_F(GifTest, WhatFollowsTheFirstFrameMustBeWhole) {
  const auto whole = gif_header({4, 3}) + to_gif({}) + std::string("\x21\xfe\x02hi\0", 6) + to_gif({}) + ";";
  EXPECT_NO_THROW(mask_of(whole));
  for (size_t length = small_gif({}).size() - 1; length < whole.size(); ++length) {
    EXPECT_NE(message_of(whole.substr(0, length)), "") << length;
  }
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

// A hand-made file costs its maker nothing; its pixels would cost the reader gigabytes.
TEST(ImageTest, SizesAreBoundedByALimitAndByTheFile) {
  const TemporaryDirectory directory;
  const auto path = directory / "a";
  const auto messages = [&](const std::string& bytes) {
    write_text(path, bytes);
    const auto message = error_of([&] { read_image(path); });
    EXPECT_EQ(error_of([&] { image_size(path); }), message);
    return message;
  };
  const auto gif = [](Size size) { return gif_header(size) + to_gif({}) + ";"; };
  EXPECT_THAT(messages(gif({65535, 65535})),
              HasSubstr(path.string() + ": 65535x65535 pixels are too many; at most 65535 a side"));
  EXPECT_THAT(messages(gif({16384, 16385})), HasSubstr("268435456 in all"));
  EXPECT_THAT(messages(gif({16384, 16384})), HasSubstr("16384x16384 pixels do not fit into 35 bytes"));
  EXPECT_THAT(messages(gif({1024, 1025})), HasSubstr("do not fit"));
  EXPECT_EQ(messages(gif({1024, 1024})), "");
}

TEST(ImageTest, AJpegWhoseHeaderClaimsMorePixelsThanItCanHold) {
  const TemporaryDirectory directory;
  const auto path = directory / "a.jpg";
  write_jpeg(path, gradient({64, 48}));
  const auto bytes = read_bytes(path);
  std::string text(bytes.begin(), bytes.end());
  // The frame header: marker, length, bits, height, width.
  text.replace(text.find("\xff\xc0") + 5, 4, std::string("\x40\0\x40\0", 4));
  write_text(path, text);
  EXPECT_THAT(error_of([&] {
                read_image(path, {8, 8});
              }),
              AllOf(HasSubstr(path.string() + ": "), HasSubstr("16384x16384 pixels do not fit")));
}

TEST(ImageTest, FlatImagesOfEveryFormatAreWithinTheBounds) {
  const TemporaryDirectory directory;
  const Image flat({3000, 3000}, 1);
  write_jpeg(directory / "a.jpg", flat);
  write_png(directory / "a.png", flat);
  write_gif(directory / "a.gif", flat);
  for (const char* name : {"a.jpg", "a.png", "a.gif"}) {
    EXPECT_EQ(read_image(directory / name).size(), (Size{3000, 3000})) << name;
  }
}

// One scan over and over costs the reader work, but hardly any bytes.
TEST(ImageTest, AJpegOfThousandsOfScansIsRefused) {
  const TemporaryDirectory directory;
  const auto path = directory / "a.jpg";
  write_jpeg(path, Image({8, 8}, 1));
  const auto bytes = read_bytes(path);
  std::string text(bytes.begin(), bytes.end());
  text[text.find("\xff\xc0") + 1] = '\xc2';  // progressive
  const auto scan = text.find("\xff\xda");
  text[scan + 8] = 0;  // of the first coefficient only
  const std::string head = text.substr(0, scan);
  const std::string one = text.substr(scan, text.size() - scan - 2);
  const auto repeated = [&](int count) {
    std::string file = head;
    for (int i = 0; i < count; ++i) file += one;
    write_text(path, file + "\xff\xd9");
    return error_of([&] { read_image(path); });
  };
  EXPECT_EQ(repeated(500), "");
  EXPECT_THAT(repeated(501), AllOf(HasSubstr(path.string() + ": "), HasSubstr("more scans")));
}

// The error comes after the encoder's buffer has grown, which must not be freed twice.
TEST(ImageTest, AJpegThatDoesNotFitIntoMemoryIsAnError) {
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
  GTEST_SKIP() << "AddressSanitizer needs more address space than the limit";
#endif
#endif
  const auto encode_in_little_memory = [] {
    Image noise({4000, 4000}, 3);
    uint32_t state = 1;
    for (uint8_t& value : noise.pixels) value = static_cast<uint8_t>((state = state * 1664525 + 1013904223) >> 24);
    const rlimit limit{address_space() + (8 << 20), RLIM_INFINITY};
    ::setrlimit(RLIMIT_AS, &limit);
    const auto message = error_of([&] { write_jpeg("absent/a.jpg", noise, 100); });
    std::_Exit(message.starts_with("absent/a.jpg: Insufficient memory") ? 0 : 1);
  };
  EXPECT_EXIT(encode_in_little_memory(), ::testing::ExitedWithCode(0), "");
}

TEST(ImageTest, WritersRefuseWhatTheirFormatCannotHold) {
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
