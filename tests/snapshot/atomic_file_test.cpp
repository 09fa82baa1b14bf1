#include "gpipe/snapshot/atomic_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "gpipe/snapshot.h"
#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(AtomicFile, KeepsThePreviousFileUntilCommit) {
  const TemporaryDirectory folder;
  const auto path = folder / "file";
  write_bytes(path, "old");
  {
    AtomicFile abandoned(path);
    abandoned.write("new", 3);
  }
  EXPECT_EQ(bytes_of(path), "old");
  EXPECT_FALSE(std::filesystem::exists(folder / "file.tmp"));

  write_bytes(folder / "file.tmp", "left by a killed writer");
  AtomicFile file(path);
  file.write("n", 1);
  file.write("ew", 2);
  EXPECT_EQ(bytes_of(path), "old");
  file.commit();
  EXPECT_EQ(bytes_of(path), "new");
  EXPECT_FALSE(std::filesystem::exists(folder / "file.tmp"));
}

TEST(AtomicFile, RefusesASecondWriter) {
  const TemporaryDirectory folder;
  const auto path = folder / "file";
  AtomicFile first(path);
  first.write("first", 5);
  EXPECT_THAT(error_of([&] { AtomicFile second(path); }), HasSubstr("another writer"));
  first.commit();
  EXPECT_EQ(bytes_of(path), "first");
  AtomicFile(path).commit();
  EXPECT_EQ(bytes_of(path), "");
}

TEST(AtomicFile, ErrorsNameThePathAndTheReason) {
  const TemporaryDirectory folder;
  EXPECT_THAT(error_of([&] { write_snapshot(folder / "absent" / "latest", {}); }),
              AllOf(HasSubstr("absent/latest"), HasSubstr("No such file")));
  std::filesystem::create_directory(folder / "folder");
  EXPECT_THAT(error_of([&] { write_snapshot(folder / "folder", {}); }),
              AllOf(HasSubstr("folder"), HasSubstr("directory")));
  EXPECT_FALSE(std::filesystem::exists(folder / "folder.tmp"));
}

}  // namespace
}  // namespace gpipe
