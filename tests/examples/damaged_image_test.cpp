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
#include "tests/examples/test_images.h"

namespace gpipe::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The address space of this process, in bytes.
size_t address_space() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

// Truncated at every eighth of the length.
TEST(DamagedImageTest, TruncatedFilesAreNamed) {
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

TEST(DamagedImageTest, TruncatedHeadersAreNamed) {
  const TemporaryDirectory directory;
  write_jpeg(directory / "a", gradient({96, 64}));
  write_png(directory / "b", gradient({96, 64}));
  write_gif(directory / "c", checkers({96, 64}));
  for (const char* name : {"a", "b", "c"}) {
    cut(directory / name, 9);
    EXPECT_THAT(error_of([&] { image_size(directory / name); }), HasSubstr((directory / name).string() + ": "));
  }
}

// A tiny file can claim gigabytes of pixels.
TEST(DamagedImageTest, SizesAreLimitedInAllAndByTheFile) {
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
              HasSubstr(path.string() + ": 65535x65535 pixels are too many; at most 65535 per side"));
  EXPECT_THAT(messages(gif({16384, 16385})), HasSubstr("268435456 in all"));
  EXPECT_THAT(messages(gif({16384, 16384})), HasSubstr("16384x16384 pixels do not fit into 35 bytes"));
  EXPECT_THAT(messages(gif({1024, 1025})), HasSubstr("do not fit"));
  EXPECT_EQ(messages(gif({1024, 1024})), "");
}

TEST(DamagedImageTest, JpegThatClaimsTooManyPixelsIsRefused) {
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

TEST(DamagedImageTest, FlatImagesOfAnyFormatAreAccepted) {
  const TemporaryDirectory directory;
  const Image flat({3000, 3000}, 1);
  write_jpeg(directory / "a.jpg", flat);
  write_png(directory / "a.png", flat);
  write_gif(directory / "a.gif", flat);
  for (const char* name : {"a.jpg", "a.png", "a.gif"}) {
    EXPECT_EQ(read_image(directory / name).size(), (Size{3000, 3000})) << name;
  }
}

// A repeated scan takes few bytes and much work.
TEST(DamagedImageTest, JpegWithThousandsOfScansIsRefused) {
  const TemporaryDirectory directory;
  const auto path = directory / "a.jpg";
  write_jpeg(path, Image({8, 8}, 1));
  const auto bytes = read_bytes(path);
  std::string text(bytes.begin(), bytes.end());
  text[text.find("\xff\xc0") + 1] = '\xc2';  // progressive
  const auto scan = text.find("\xff\xda");
  text[scan + 8] = 0;  // of the first coefficient alone
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

// The error occurs after the encoder's buffer has grown. The buffer must not be freed twice.
TEST(DamagedImageTest, JpegThatDoesNotFitIntoMemoryIsAnError) {
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
  GTEST_SKIP() << "AddressSanitizer needs more address space than the limit";
#endif
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a new process, whose heap has no free blocks of earlier tests
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

}  // namespace
}  // namespace gpipe::examples
