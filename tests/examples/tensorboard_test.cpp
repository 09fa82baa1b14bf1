#include "examples/common/tensorboard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>
#include <vector>

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

// Writes a file with a value at steps 1 to 3, and a picture after the second.
std::filesystem::path write_events(const std::filesystem::path& folder) {
  EventFile file(folder);
  for (int step = 1; step <= 3; ++step) {
    file.add_scalar("loss", step, 0.5);
    if (step == 2) file.add_image("picture", step, {1, 2, 3}, 300, 1);
  }
  return file.path();
}

using Records = std::vector<std::pair<std::string, int64_t>>;

Records cut_at(const std::filesystem::path& folder, int64_t last) {
  Records seen;
  cut_event_files(folder, [&](std::string_view tag, int64_t step) {
    seen.emplace_back(tag, step);
    return step <= last;
  });
  return seen;
}

TEST(EventFileTest, FilesAreCutBeforeTheFirstRefusedRecord) {
  const TemporaryDirectory directory;
  const auto path = write_events(directory.path());
  const auto whole = read_bytes(path);
  const Records all = {{"loss", 1}, {"loss", 2}, {"picture", 2}, {"loss", 3}};
  EXPECT_EQ(cut_at(directory.path(), 3), all);
  EXPECT_EQ(read_bytes(path), whole);
  EXPECT_EQ(cut_at(directory.path(), 2), all);
  const auto shorter = read_bytes(path);
  ASSERT_LT(shorter.size(), whole.size());
  EXPECT_TRUE(std::equal(shorter.begin(), shorter.end(), whole.begin()));
  EXPECT_EQ(cut_at(directory.path(), 2), (Records{{"loss", 1}, {"loss", 2}, {"picture", 2}}));
  EXPECT_EQ(read_bytes(path), shorter);
}

TEST(EventFileTest, FilesWithoutRecordsAreRemovedAndOthersStay) {
  const TemporaryDirectory directory;
  const auto path = write_events(directory.path());
  write_text(directory / "events.out.tfevents.1.other", "x");
  EXPECT_EQ(cut_at(directory.path(), 0), (Records{{"loss", 1}}));
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_TRUE(std::filesystem::exists(directory / "events.out.tfevents.1.other"));
}

TEST(EventFileTest, ARecordThatIsNotWholeIsCutOff) {
  const TemporaryDirectory directory;
  const auto path = write_events(directory.path());
  const auto whole = read_bytes(path);
  cut_at(directory.path(), 2);
  const auto shorter = std::filesystem::file_size(path);
  for (auto size = shorter; size < whole.size(); ++size) {
    write_file(path, std::vector<uint8_t>(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    EXPECT_EQ(cut_at(directory.path(), 3).size(), 3u) << size;
    EXPECT_EQ(std::filesystem::file_size(path), shorter) << size;
  }
  for (auto changed = shorter; changed < whole.size(); ++changed) {
    auto damaged = whole;
    damaged[changed] ^= 1;
    write_file(path, damaged);
    EXPECT_EQ(cut_at(directory.path(), 3).size(), 3u) << changed;
    EXPECT_EQ(std::filesystem::file_size(path), shorter) << changed;
  }
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
