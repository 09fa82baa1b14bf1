#include "examples/common/tensorboard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "tests/examples/fixtures.h"

namespace gpipe::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// From RFC 3720, appendix B.4, and the check value of the CRC catalogue.
TEST(Crc32cTest, MatchesTheKnownValues) {
  std::string ascending(32, '\0');
  std::iota(ascending.begin(), ascending.end(), '\0');
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
  EXPECT_EQ(crc32c(std::string(ascending.rbegin(), ascending.rend())), 0x113fdb5cu);
}

// tensorboard/ tests what TensorBoard reads from such files.
TEST(EventFileTest, RecordsAreFramed) {
  const TemporaryDirectory directory;
  EventFile file(directory / "new" / "runs");
  const auto bytes = read_bytes(file.path());
  // Length and CRC of the length; 9 bytes of time, 2 of the step, 15 of the version; CRC of these.
  ASSERT_EQ(bytes.size(), 12u + 26u + 4u);
  EXPECT_EQ(std::vector<uint8_t>(bytes.begin(), bytes.begin() + 8), (std::vector<uint8_t>{26, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_THAT(std::string(bytes.begin(), bytes.end()), HasSubstr("\x1a\x0d"
                                                                 "brain.Event:2"));
  EXPECT_THAT(file.path().filename().string(), HasSubstr("tfevents"));
  EXPECT_TRUE(is_event_file(file.path().filename().string()));
  EXPECT_FALSE(is_event_file("events.out.tfevents.1700000000.other"));
}

TEST(EventFileTest, FlushWritesRecordsToDisk) {
  const TemporaryDirectory directory;
  EventFile file(directory.path());
  const auto before = std::filesystem::file_size(file.path());
  file.add_scalar("loss", 1, 0.5);
  file.flush();
  EXPECT_GT(std::filesystem::file_size(file.path()), before);
}

TEST(EventFileTest, FilesOfEarlierRunsStayAndSortFirst) {
  const TemporaryDirectory directory;
  const EventFile first(directory.path());
  const EventFile second(directory.path());
  EXPECT_LT(first.path(), second.path());
}

TEST(EventFileTest, UnwritablePathIsNamed) {
  const TemporaryDirectory directory;
  write_text(directory / "file", "x");
  EXPECT_THAT(error_of([&] { EventFile(directory / "file" / "runs"); }),
              AllOf(HasSubstr((directory / "file" / "runs").string()), HasSubstr("directory")));
  EXPECT_THAT(error_of([&] { EventFile(directory / "file"); }), HasSubstr((directory / "file").string()));
}

}  // namespace
}  // namespace gpipe::examples
