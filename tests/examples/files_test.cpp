#include "examples/common/files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/examples/fixtures.h"

namespace gpipe::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FilesTest, CheckCreatesAnEmptyWritableFolder) {
  const TemporaryDirectory directory;
  const auto path = directory / "a" / "b";
  check_writable_directory(path);
  EXPECT_TRUE(std::filesystem::is_directory(path));
  EXPECT_TRUE(std::filesystem::is_empty(path));
  EXPECT_NO_THROW(check_writable_directory(path));
}

TEST(FilesTest, UnusableFolderIsNamed) {
  const TemporaryDirectory directory;
  write_text(directory / "file", "x");
  for (const auto& path : {directory / "file", directory / "file" / "below"}) {
    EXPECT_THAT(error_of([&] { check_writable_directory(path); }),
                AllOf(HasSubstr(path.string()), HasSubstr("directory")));
  }
}

TEST(FilesTest, OnlyEmptyFoldersOfThisProcessAreRemoved) {
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "older");
  make_directory(directory / "older");
  make_directory(directory / "older" / "a" / "b");
  make_directory(directory / "full" / "c");
  make_directory(directory / "full" / "d");
  write_text(directory / "full" / "c" / "file", "x");
  remove_empty_directories();
  EXPECT_TRUE(std::filesystem::exists(directory / "older"));
  EXPECT_FALSE(std::filesystem::exists(directory / "older" / "a"));
  EXPECT_TRUE(std::filesystem::exists(directory / "full" / "c" / "file"));
}

TEST(FilesTest, WriteReplacesTheFile) {
  const TemporaryDirectory directory;
  write_file(directory / "a", "abc");
  write_file(directory / "a", std::vector<uint8_t>{4});
  EXPECT_EQ(read_bytes(directory / "a"), (std::vector<uint8_t>{4}));
}

TEST(FilesTest, FullDiskIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  EXPECT_THAT(error_of([] { write_file("/dev/full", "x"); }), AllOf(HasSubstr("/dev/full"), HasSubstr("No space")));
}

TEST(FilesTest, CheckLeavesAWritableFileAsItIs) {
  const TemporaryDirectory directory;
  const auto path = directory / "a" / "file";
  check_writable_file(path);
  EXPECT_TRUE(std::filesystem::is_empty(directory / "a"));
  write_file(path, "abc");
  check_writable_file(path);
  EXPECT_EQ(read_bytes(path), (std::vector<uint8_t>{'a', 'b', 'c'}));
}

TEST(FilesTest, UnwritableFileIsNamed) {
  const TemporaryDirectory directory;
  write_text(directory / "file", "x");
  EXPECT_THAT(error_of([&] { check_writable_file(directory.path()); }),
              AllOf(HasSubstr("cannot write " + directory.path().string()), HasSubstr("directory")));
  EXPECT_THAT(error_of([&] { check_writable_file(directory / "file" / "below"); }),
              HasSubstr((directory / "file").string()));
  EXPECT_THAT(error_of([&] { check_writable_file(directory / std::string(300, 'a')); }), HasSubstr("too long"));
  EXPECT_THAT(error_of([&] { OutputFile(directory / "none" / "file"); }), HasSubstr("No such file"));
}

TEST(FilesTest, RenamedFileCanGrow) {
  const TemporaryDirectory directory;
  write_text(directory / "b", "old");
  OutputFile file(directory / "a");
  file.write("new");
  EXPECT_EQ(read_bytes(directory / "b").size(), 3u);
  file.rename(directory / "b");
  EXPECT_FALSE(std::filesystem::exists(directory / "a"));
  file.write("er");
  file.flush();
  EXPECT_EQ(read_bytes(directory / "b"), (std::vector<uint8_t>{'n', 'e', 'w', 'e', 'r'}));
  EXPECT_EQ(file.path(), directory / "b");
}

}  // namespace
}  // namespace gpipe::examples
