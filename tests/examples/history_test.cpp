#include "examples/unet/history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <locale>
#include <string>

#include "tests/examples/fixtures.h"

namespace gpipe::unet {
namespace {

using ::testing::HasSubstr;

constexpr char kHeader[] = "epoch,train_loss,val_loss,val_dice,val_iou,images_per_second,seconds\n";

std::string text_of(const std::filesystem::path& path) {
  const auto bytes = read_bytes(path);
  return {bytes.begin(), bytes.end()};
}

TEST(HistoryTest, EachLineIsOnDiskAtOnce) {
  const TemporaryDirectory directory;
  const auto path = directory / "history.csv";
  write_text(path, "of an older run");
  History history(path);
  EXPECT_EQ(text_of(path), kHeader);
  history.add({1, 0.5, 0.25, 0.9, 0.8, 123.5, 12.25});
  EXPECT_EQ(text_of(path), kHeader + std::string("1,0.5,0.25,0.9,0.8,123.5,12.25\n"));
  history.add({2, 1e-7, 0, 1, 1, 2000.5, 3});
  EXPECT_THAT(text_of(path), HasSubstr("\n2,1e-07,0,1,1,2000.5,3\n"));
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
    History history(directory / "history.csv");
    history.add({1000, 0.5, 0.25, 0.9, 0.8, 1234.5, 12.25});
  }
  std::locale::global(before);
  EXPECT_EQ(text_of(directory / "history.csv"), kHeader + std::string("1000,0.5,0.25,0.9,0.8,1234.5,12.25\n"));
}

TEST(HistoryTest, UnwritablePathIsNamed) {
  const TemporaryDirectory directory;
  const auto path = directory / "absent" / "history.csv";
  EXPECT_THAT(error_of([&] { History history(path); }), HasSubstr(path.string()));
}

TEST(HistoryTest, AFullDiskIsAnError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  EXPECT_THAT(error_of([] { History history("/dev/full"); }), HasSubstr("/dev/full"));
}

}  // namespace
}  // namespace gpipe::unet
