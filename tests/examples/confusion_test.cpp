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

// Finds the cells by their distance from the picture's right and lower edges.
class Cells {
 public:
  Cells(const Counts& counts, int classes) : classes_(classes), picture_(draw_confusion(counts, classes)) {}

  int side() const { return pitch() - 1; }

  Pixels cell(int row, int column) const { return crop(picture_, left(column), top(row), side(), side()); }
  Pixels inside(int row, int column) const {
    return crop(picture_, left(column) + 1, top(row) + 1, side() - 2, side() - 2);
  }
  int brightness(int row, int column) const { return cell(row, column).front(); }
  bool written(int row, int column) const {
    const auto pixels = cell(row, column);
    return std::set(pixels.begin(), pixels.end()).size() > 1;
  }
  Pixels row_label(int row) const { return crop(picture_, left(0) - kLabelBar, top(row), kLabelBar - 1, side()); }
  Pixels column_label(int column) const {
    return crop(picture_, left(column), top(0) - kLabelBar, side(), kLabelBar - 1);
  }
  Pixels title() const { return crop(picture_, 0, 0, picture_.width, kTitleBar); }
  Pixels axis_names() const {
    auto names = crop(picture_, 0, top(0), left(0) - kLabelBar - 1, top(classes_ - 1) - top(0) + side());
    const auto above = crop(picture_, left(0), kTitleBar, picture_.width - left(0), top(0) - kLabelBar - kTitleBar);
    names.insert(names.end(), above.begin(), above.end());
    return names;
  }

 private:
  static constexpr int kLabelBar = 28;
  static constexpr int kTitleBar = 34;
  static constexpr int kBorder = 12;

  int left(int column) const { return picture_.width - kBorder - (classes_ - column) * pitch(); }
  int top(int row) const { return picture_.height - kBorder - (classes_ - row) * pitch(); }

  int classes_;
  Image picture_;
};

int lightest(const Pixels& pixels) { return *std::max_element(pixels.begin(), pixels.end()); }
int darkest(const Pixels& pixels) { return *std::min_element(pixels.begin(), pixels.end()); }

TEST(ConfusionTest, BrightnessShowsTheShareOfTheRow) {
  const Cells cells({0, 7, 0, 75, 0, 25, 0, 0, 0}, 3);
  EXPECT_EQ(cells.brightness(0, 1), 255);
  EXPECT_EQ(cells.brightness(0, 0), 0);
  EXPECT_EQ(cells.brightness(1, 0), 221) << "the square root of three quarters";
  EXPECT_EQ(cells.brightness(1, 2), 128) << "the square root of one quarter";
  for (int column = 0; column < 3; ++column) EXPECT_EQ(cells.brightness(2, column), 0) << "a class without images";
}

TEST(ConfusionTest, RowsAndColumnsAreLabelled) {
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

TEST(ConfusionTest, CountsContrastWithTheirCell) {
  const Cells cells({999, 1, 30, 70}, 2);
  EXPECT_LT(darkest(cells.cell(0, 0)), cells.brightness(0, 0) - 150);
  EXPECT_GT(lightest(cells.cell(0, 1)), cells.brightness(0, 1) + 150);
  EXPECT_LT(darkest(cells.cell(1, 0)), cells.brightness(1, 0) - 110);
  EXPECT_LT(darkest(cells.cell(1, 1)), cells.brightness(1, 1) - 150);
}

TEST(ConfusionTest, CellsShowTheirCount) {
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

TEST(ConfusionTest, ZeroAndCountsThatDoNotFitAreNotWritten) {
  const Cells cells({100000000, 0, 0, 5}, 2);
  EXPECT_FALSE(cells.written(0, 0));
  EXPECT_FALSE(cells.written(0, 1));
  EXPECT_TRUE(cells.written(1, 1));
}

TEST(ConfusionTest, TitleTellsTheAccuracyAndAxesAreNamed) {
  const Cells half({5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5}, 4);
  const Cells all({5, 0, 0, 0, 0, 5, 0, 0, 0, 0, 5, 0, 0, 0, 0, 5}, 4);
  EXPECT_NE(half.title(), all.title());
  EXPECT_EQ(half.axis_names(), all.axis_names());
  EXPECT_GT(lightest(all.axis_names()) - darkest(all.axis_names()), 150);
}

TEST(ConfusionTest, RefusesWhatIsNotAMatrix) {
  EXPECT_THROW(draw_confusion({}, 0), std::invalid_argument);
  EXPECT_THROW(draw_confusion({1, 2, 3}, 2), std::invalid_argument);
  EXPECT_THROW(draw_confusion({1, 0, -1, 1}, 2), std::invalid_argument);
}

}  // namespace
}  // namespace gpipe::examples::mnist
