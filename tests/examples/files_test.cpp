#include "examples/common/files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/examples/fixtures.h"

namespace gpipe::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FilesTest, MakesAWritableDirectoryAndLeavesItEmpty) {
  const TemporaryDirectory directory;
  const auto path = directory / "a" / "b";
  check_writable_directory(path);
  EXPECT_TRUE(std::filesystem::is_directory(path));
  EXPECT_TRUE(std::filesystem::is_empty(path));
  EXPECT_NO_THROW(check_writable_directory(path));
}

TEST(FilesTest, NamesADirectoryThatCannotBe) {
  const TemporaryDirectory directory;
  write_text(directory / "file", "x");
  for (const auto& path : {directory / "file", directory / "file" / "below"}) {
    EXPECT_THAT(error_of([&] { check_writable_directory(path); }),
                AllOf(HasSubstr(path.string()), HasSubstr("directory")));
  }
}

TEST(FilesTest, ReplacesAFile) {
  const TemporaryDirectory directory;
  write_file(directory / "a", {1, 2, 3});
  write_file(directory / "a", {4});
  EXPECT_EQ(read_bytes(directory / "a"), (std::vector<uint8_t>{4}));
}

TEST(FilesTest, ADiskThatIsFullIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  EXPECT_THAT(error_of([] { write_file("/dev/full", {1}); }), AllOf(HasSubstr("/dev/full"), HasSubstr("No space")));
}

}  // namespace
}  // namespace gpipe::examples
