#include "examples/resnet18_mnist/confusion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>

namespace gpipe::examples::mnist {
namespace {

using Counts = std::vector<std::int64_t>;
using Pixels = std::vector<std::uint8_t>;

int pitch() { return draw_confusion(Counts(4), 2).width - draw_confusion({0}, 1).width; }

Pixels crop(const Image& picture, int left, int top, int width, int height) {
  Pixels pixels;
  for (int y = top; y < top + height; ++y)
    pixels.insert(pixels.end(), picture.at(left, y), picture.at(left, y) + width);
  return pixels;
}

// Cells end at the picture's right and lower edge, each a line behind the one before.
class Cells {
 public:
  Cells(const Counts& counts, int classes) : classes_(classes), picture_(draw_confusion(counts, classes)) {}

  int margin() const { return at(0); }
  int side() const { return pitch() - 1; }

  Pixels cell(int row, int column) const { return crop(picture_, at(column), at(row), side(), side()); }
  Pixels inside(int row, int column) const {
    return crop(picture_, at(column) + 1, at(row) + 1, side() - 2, side() - 2);
  }
  int brightness(int row, int column) const { return cell(row, column).front(); }
  bool written(int row, int column) const {
    const auto pixels = cell(row, column);
    return std::set(pixels.begin(), pixels.end()).size() > 1;
  }
  Pixels row_label(int row) const { return crop(picture_, 0, at(row), margin() - 1, side()); }
  Pixels column_label(int column) const { return crop(picture_, at(column), 0, side(), margin() - 1); }

 private:
  int at(int cell) const { return picture_.width - (classes_ - cell) * pitch(); }

  int classes_;
  Image picture_;
};

int lightest(const Pixels& pixels) { return *std::max_element(pixels.begin(), pixels.end()); }
int darkest(const Pixels& pixels) { return *std::min_element(pixels.begin(), pixels.end()); }

TEST(ConfusionTest, ACellIsAsBrightAsItsShareOfTheRow) {
  const Cells cells({0, 7, 0, 75, 0, 25, 0, 0, 0}, 3);
  EXPECT_EQ(cells.brightness(0, 1), 255);
  EXPECT_EQ(cells.brightness(0, 0), 0);
  EXPECT_EQ(cells.brightness(1, 0), 221) << "the root of three quarters";
  EXPECT_EQ(cells.brightness(1, 2), 128) << "the root of one quarter";
  for (int column = 0; column < 3; ++column) EXPECT_EQ(cells.brightness(2, column), 0) << "a class without images";
}

TEST(ConfusionTest, RowsAndColumnsShowTheirClass) {
  const Cells cells(Counts(144), 12);
  std::set<Pixels> rows;
  std::set<Pixels> columns;
  for (int label = 0; label < 12; ++label) {
    rows.insert(cells.row_label(label));
    columns.insert(cells.column_label(label));
    for (const auto& pixels : {cells.row_label(label), cells.column_label(label)}) {
      EXPECT_GT(lightest(pixels) - darkest(pixels), 150) << label;
    }
  }
  EXPECT_EQ(rows.size(), 12u);
  EXPECT_EQ(columns.size(), 12u);
}

TEST(ConfusionTest, NumbersStandOutFromTheirCell) {
  const Cells cells({999, 1, 30, 70}, 2);
  EXPECT_LT(darkest(cells.cell(0, 0)), cells.brightness(0, 0) - 150);
  EXPECT_GT(lightest(cells.cell(0, 1)), cells.brightness(0, 1) + 150);
  EXPECT_LT(darkest(cells.cell(1, 0)), cells.brightness(1, 0) - 110);
  EXPECT_LT(darkest(cells.cell(1, 1)), cells.brightness(1, 1) - 150);
}

TEST(ConfusionTest, ACellShowsItsCount) {
  std::set<Pixels> numbers;
  const Counts counts = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 42, 11111, 88888, 99999};
  for (const auto count : counts) {
    const Cells cells({count}, 1);
    numbers.insert(cells.cell(0, 0));
    const auto inside = cells.inside(0, 0);
    EXPECT_EQ(std::count(inside.begin(), inside.end(), 255) + 4 * (cells.side() - 1),
              std::ranges::count(cells.cell(0, 0), 255))
        << count << " touches the edge of its cell";
  }
  EXPECT_EQ(numbers.size(), counts.size());
}

TEST(ConfusionTest, NothingIsWrittenWhereNothingIsOrTheCountHasNoRoom) {
  const Cells cells({100000000, 0, 0, 5}, 2);
  EXPECT_FALSE(cells.written(0, 0));
  EXPECT_FALSE(cells.written(0, 1));
  EXPECT_TRUE(cells.written(1, 1));
}

TEST(ConfusionTest, RefusesWhatIsNoMatrix) {
  EXPECT_THROW(draw_confusion({}, 0), std::invalid_argument);
  EXPECT_THROW(draw_confusion({1, 2, 3}, 2), std::invalid_argument);
  EXPECT_THROW(draw_confusion({1, 0, -1, 1}, 2), std::invalid_argument);
}

}  // namespace
}  // namespace gpipe::examples::mnist
