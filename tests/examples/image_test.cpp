#include "examples/common/image.h"

#include <ATen/ATen.h>

#include "examples/common/drawing.h"
#include "examples/common/files.h"
#include "tests/support/matchers.h"

namespace gpipe::examples {
namespace {

// Pictures of 11 x 9 pixels in each format.
const std::filesystem::path kImages = std::filesystem::path(__FILE__).parent_path() / "images";

class ImageTest : public ::testing::Test {
 protected:
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
}

// Transparent pixels keep their colour, as with Pillow's convert("RGB"), which made the file: (10, 20, 30) opaque,
// (200, 100, 50) transparent, (200, 100, 50) half transparent.
TEST_F(ImageTest, AlphaChannelOfPngIsIgnored) {
  EXPECT_TRUE(at::equal(read_image(kImages / "alpha.png"),
                        at::tensor({10, 200, 200, 20, 100, 100, 30, 50, 50}, at::kByte).view({3, 1, 3})));
}

TEST_F(ImageTest, JpegIsDecodedNoLargerThanNeeded) {
  const auto whole = read_image(kImages / "accepted.jpg");
  EXPECT_EQ(whole.sizes(), at::IntArrayRef({3, 9, 11}));
  EXPECT_NEAR(whole[0][0][5].item<int>(), 33, 2);
  EXPECT_NEAR(whole[1][0][5].item<int>(), 226, 2);
  for (const Size size : {Size{5, 4}, Size{6, 5}, Size{11, 9}, Size{22, 18}}) {
    const auto image = read_image(kImages / "accepted.jpg", size).to(at::kFloat);
    EXPECT_EQ(image.sizes(), at::IntArrayRef({3, size.height, size.width}));
    EXPECT_LT((image - resize_smoothly(whole, size)).abs().mean().item<double>(), 10) << to_string(size);
  }
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
  EXPECT_THAT(message_of("this is not an image"), HasSubstr("not a JPEG, PNG or GIF"));
  EXPECT_THAT(message_of(""), HasSubstr("is empty"));
  EXPECT_THAT(error_of([&] { image_size(directory_ / "absent"); }),
              AllOf(HasSubstr("absent: "), HasSubstr("No such file")));
  EXPECT_THAT(error_of([&] { read_image(directory_.path()); }), HasSubstr("directory"));
  const auto image = at::zeros({2, 2}, at::kByte);
  EXPECT_THAT(error_of([&] { write_png(directory_ / "none" / "a", image); }), HasSubstr("No such file"));
}

TEST_F(ImageTest, TruncatedFilesAreNamed) {
  for (const auto* name : {"accepted.jpg", "accepted.png", "accepted.gif"}) {
    const auto whole = read_file(kImages / name);
    EXPECT_EQ(read(whole).sizes(), at::IntArrayRef({3, 9, 11})) << name;
    for (std::size_t eighths = 1; eighths < 8; ++eighths) message_of(whole.substr(0, whole.size() * eighths / 8));
  }
}

// --- GIF files, built by hand. The canvas is 4 x 3.

std::string word(int value) { return {static_cast<char>(value), static_cast<char>(value >> 8)}; }

// Pixel data with codes of three bits: 0 to 3 are colours, 4 clears the table, 5 ends. REQUIRES: fewer than four codes
// follow a 4, because codes would become longer.
std::string lzw(const std::vector<int>& codes) {
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < codes.size(); ++i) bits |= static_cast<std::uint64_t>(codes[i]) << (3 * i);
  std::string data;
  for (; bits != 0; bits >>= 8) data += static_cast<char>(bits);
  return "\x02" + std::string(1, static_cast<char>(data.size())) + data + '\0';
}

struct Frame {
  int left = 1;
  int top = 2;
  int width = 2;
  int height = 1;
  char flags = 0;  // 0x40 interlaced, 0x80 with a local palette of two
  std::string palette = {};
  std::string data = lzw({4, 1, 1, 5});
};

std::string gif(const Frame& frame, Size canvas = {4, 3}) {
  return "GIF89a" + word(canvas.width) + word(canvas.height) + std::string("\x80\0\0\0\0\0\xff\xff\xff,", 10) +
         word(frame.left) + word(frame.top) + word(frame.width) + word(frame.height) + frame.flags + frame.palette +
         frame.data + ";";
}

// Which pixels are white.
class GifTest : public ImageTest {
 protected:
  std::vector<int> white(const std::string& bytes) {
    const auto places = (read(bytes)[0] == 255).flatten().nonzero().flatten().to(at::kInt);
    return {places.const_data_ptr<int>(), places.const_data_ptr<int>() + places.numel()};
  }
};

TEST_F(GifTest, FrameIsPlacedClippedAndReordered) {
  EXPECT_EQ(white(gif({})), (std::vector<int>{9, 10}));
  EXPECT_EQ(white(gif({.left = 3})), (std::vector<int>{11}));
  EXPECT_EQ(white(gif({.left = 65535, .top = 65535})), (std::vector<int>{}));
  // Rows 0, 4, 2, 1, 3 of one pixel.
  EXPECT_EQ(white(gif({0, 0, 1, 5, 0x40, {}, lzw({4, 0, 0, 4, 0, 1, 4, 1, 5})}, {1, 5})), (std::vector<int>{1, 3}));
  const std::string white_and_black("\xff\xff\xff\0\0\0", 6);
  EXPECT_EQ(white(gif({.flags = '\x80', .palette = white_and_black})), (std::vector<int>{}));
}

TEST_F(GifTest, DamagedFramesAreErrors) {
  EXPECT_THAT(message_of(gif({.width = 0})), HasSubstr("first frame has no pixels"));
  EXPECT_THAT(message_of(gif({.width = 3})), HasSubstr("Image EOF detected before image complete"));
  EXPECT_THAT(message_of(gif({.width = 65535, .height = 65535})), HasSubstr("Image EOF"));
  EXPECT_THAT(message_of(gif({.data = lzw({4, 3, 1, 5})})), HasSubstr("palette lacks"));
  EXPECT_THAT(message_of(gif({.data = lzw({4, 7, 1, 5})})), HasSubstr("defective"));
  EXPECT_THAT(message_of(gif({}).substr(0, 19) + ";"), HasSubstr("no frame"));
  EXPECT_THAT(message_of(gif({}).substr(0, 19) + "?"), HasSubstr("Wrong record type"));
  EXPECT_THAT(message_of(read_file(kImages / "no-palette.gif")), HasSubstr("no palette"));
}

// A tiny file can claim gigabytes of pixels.
TEST_F(GifTest, SizesAreLimitedInAllAndByTheFile) {
  EXPECT_THAT(message_of(gif({}, {65535, 65535})),
              HasSubstr("65535x65535 pixels are too many; at most 65535 per side"));
  EXPECT_THAT(message_of(gif({}, {16384, 16385})), HasSubstr("268435456 in all"));
  EXPECT_THAT(message_of(gif({}, {16384, 16384})), HasSubstr("16384x16384 pixels do not fit into 35 bytes"));
  EXPECT_THAT(error_of([&] { image_size(path_); }), HasSubstr("do not fit"));
  EXPECT_EQ(white(gif({}, {1024, 1024})).size(), 2u);
  EXPECT_THAT(message_of(read_file(kImages / "huge.jpg")), HasSubstr("65500x65500 pixels are too many"));
}

}  // namespace
}  // namespace gpipe::examples
