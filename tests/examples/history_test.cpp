#include "examples/common/history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <locale>
#include <string>
#include <vector>

#include "tests/examples/fixtures.h"

namespace gpipe::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<std::string> kColumns{"epoch", "loss", "images_per_second"};
constexpr char kHeader[] = "epoch,loss,images_per_second\n";

std::string text_of(const std::filesystem::path& path) {
  const auto bytes = read_bytes(path);
  return {bytes.begin(), bytes.end()};
}

TEST(HistoryTest, LinesAreOnDiskAtOnce) {
  const TemporaryDirectory directory;
  const auto path = directory / "history.csv";
  write_text(path, "of an older run");
  History history(path, kColumns);
  EXPECT_EQ(text_of(path), kHeader);
  history.add({1, 0.25, 123.5});
  EXPECT_EQ(text_of(path), kHeader + std::string("1,0.25,123.5\n"));
  history.add({2, 1e-7, 2000.5});
  EXPECT_THAT(text_of(path), HasSubstr("\n2,1e-07,2000.5\n"));
}

TEST(HistoryTest, IntegersAreWrittenInFull) {
  const TemporaryDirectory directory;
  History history(directory / "history.csv", kColumns);
  history.add({1234567, -20000000, 1234567.25});
  history.add({0, std::nan(""), 1e300});
  EXPECT_EQ(text_of(directory / "history.csv"), kHeader + std::string("1234567,-20000000,1.23457e+06\n0,nan,1e+300\n"));
}

TEST(HistoryTest, LinesHaveAValuePerColumn) {
  const TemporaryDirectory directory;
  const auto path = directory / "history.csv";
  History history(path, kColumns);
  EXPECT_THAT(error_of<std::invalid_argument>([&] {
                history.add({1, 2});
              }),
              AllOf(HasSubstr(path.string()), HasSubstr("3 columns"), HasSubstr("2 values")));
  EXPECT_EQ(text_of(path), kHeader);
  EXPECT_THROW(History(directory / "none.csv", {}), std::invalid_argument);
  EXPECT_FALSE(std::filesystem::exists(directory / "none.csv"));
}

struct CommaLocale : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(HistoryTest, NumbersDoNotFollowTheLocale) {
  const TemporaryDirectory directory;
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new CommaLocale));
  {
    History history(directory / "history.csv", kColumns);
    history.add({1000, 0.25, 1234.5});
  }
  std::locale::global(before);
  EXPECT_EQ(text_of(directory / "history.csv"), kHeader + std::string("1000,0.25,1234.5\n"));
}

TEST(HistoryTest, UnwritablePathIsNamed) {
  const TemporaryDirectory directory;
  const auto path = directory / "absent" / "history.csv";
  EXPECT_THAT(error_of([&] { History history(path, kColumns); }), HasSubstr(path.string()));
}

TEST(HistoryTest, StartsWithTheGivenLines) {
  const TemporaryDirectory directory;
  const auto path = directory / "history.csv";
  History history(path, kColumns, {{1, 0.5, 2}, {2, 0.25, 3}});
  history.add({3, 0.125, 4});
  EXPECT_EQ(text_of(path), kHeader + std::string("1,0.5,2\n2,0.25,3\n3,0.125,4\n"));
}

TEST(HistoryTest, OlderFileStaysUntilTheNewOneIsComplete) {
  const TemporaryDirectory directory;
  const auto path = directory / "history.csv";
  write_text(path, "of an older run");
  EXPECT_THROW(History(path, kColumns, {{1, 2}}), std::invalid_argument);
  EXPECT_EQ(text_of(path), "of an older run");
  EXPECT_FALSE(std::filesystem::exists(temporary_history(path)));
}

TEST(HistoryTest, LinesAreCountedWithoutTheHeader) {
  const TemporaryDirectory directory;
  const auto path = directory / "history.csv";
  EXPECT_EQ(count_lines(path), 0);
  History history(path, kColumns);
  EXPECT_EQ(count_lines(path), 0);
  history.add({1, 2, 3});
  history.add({4, 5, 6});
  EXPECT_EQ(count_lines(path), 2);
}

// A limit of the file size fails like a full disk.
TEST(HistoryTest, FileThatCannotGrowIsAnError) {
  const TemporaryDirectory directory;
  const auto path = directory / "history.csv";
  History history(path, kColumns);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit limit{.rlim_cur = sizeof kHeader - 1, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto error = error_of([&] { history.add({1, 2, 3}); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(error, AllOf(HasSubstr("cannot write " + path.string()), HasSubstr("too large")));
  EXPECT_EQ(text_of(path), kHeader);
}

}  // namespace
}  // namespace gpipe::examples
