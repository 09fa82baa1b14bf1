#include "examples/common/image.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/examples/fixtures.h"
#include "tests/examples/test_images.h"

namespace gpipe::examples {
namespace {

using ::testing::HasSubstr;

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

TEST_F(GifTest, FrameCanBeSmallerThanItsCanvas) {
  EXPECT_EQ(mask_of(small_gif({})), (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0}));
}

TEST_F(GifTest, OnlyTheFirstFrameIsDrawn) {
  const std::string two = to_gif({}) + to_gif({.left = 0, .top = 0});
  EXPECT_EQ(mask_of(gif_header({4, 3}) + two + ";"), (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0}));
}

TEST_F(GifTest, FrameOutsideItsCanvasIsClipped) {
  EXPECT_EQ(mask_of(small_gif({.left = 3})), (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}));
  EXPECT_EQ(mask_of(small_gif({.left = 4})), std::vector<uint8_t>(12, 0));
  EXPECT_EQ(mask_of(small_gif({.top = 3})), std::vector<uint8_t>(12, 0));
  EXPECT_EQ(mask_of(small_gif({.left = 65535, .top = 65535})), std::vector<uint8_t>(12, 0));
}

TEST_F(GifTest, InterlacedRowsAreReordered) {
  // Rows 0, 4, 2, 1, 3 of one pixel.
  const auto data = lzw({4, 0, 0, 4, 0, 1, 4, 1, 5});
  EXPECT_EQ(mask_of(gif_header({1, 5}) + to_gif({0, 0, 1, 5, 0x40, {}, data}) + ";"),
            (std::vector<uint8_t>{0, 1, 0, 1, 0}));
}

TEST_F(GifTest, FramePaletteReplacesTheGlobalOne) {
  const std::string white_and_black("\xff\xff\xff\0\0\0", 6);
  EXPECT_EQ(mask_of(small_gif({.flags = '\x80', .palette = white_and_black})), std::vector<uint8_t>(12, 0));
}

TEST_F(GifTest, TransparentPixelsKeepTheirColour) {
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

// The frame claims 4 GiB. At most a row of 64 KiB is in memory.
TEST_F(GifTest, LargeFrameIsDecodedRowByRow) {
  EXPECT_THAT(message_of(small_gif({0, 0, 65535, 65535})), HasSubstr("Image EOF detected before image complete"));
  const auto huge = to_gif({.width = 65535, .height = 65535});
  EXPECT_EQ(mask_of(gif_header({4, 3}) + to_gif({}) + huge + huge + ";"), mask_of(small_gif({})));
}

TEST_F(GifTest, DataAfterTheFirstFrameMustBeComplete) {
  const auto whole = gif_header({4, 3}) + to_gif({}) + std::string("\x21\xfe\x02hi\0", 6) + to_gif({}) + ";";
  EXPECT_NO_THROW(mask_of(whole));
  for (size_t length = small_gif({}).size() - 1; length < whole.size(); ++length) {
    EXPECT_NE(message_of(whole.substr(0, length)), "") << length;
  }
}

}  // namespace
}  // namespace gpipe::examples
