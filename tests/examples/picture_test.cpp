#include "examples/common/picture.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "examples/common/text.h"

namespace gpipe::examples {
namespace {

std::vector<int> pixel(const Image& picture, int x, int y) { return {picture.at(x, y), picture.at(x, y) + 3}; }

TEST(PictureTest, ColumnsOfEnlargedTilesAreSideBySide) {
  auto images = at::zeros({2, 3, 4, 5});
  images[1][2].fill_(1);
  auto prediction = at::full({2, 3, 4, 5}, 0.5, at::kDouble);
  prediction[1][0][0][0] = 7;
  const Image picture = draw_picture({{"image", images}, {"prediction", prediction}});
  const int factor = 52;  // the least that makes 5 pixels 256 or more
  const Size tile{5 * factor, 4 * factor};
  const int gap = picture.width - 2 * tile.width;
  const int title = picture.height - 2 * tile.height - gap;
  EXPECT_GT(gap, 0);
  EXPECT_GT(title, 16);
  const int second_row = title + tile.height + gap;
  EXPECT_EQ(pixel(picture, 0, title), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(pixel(picture, tile.width - 1, picture.height - 1), (std::vector<int>{0, 0, 255}));
  EXPECT_EQ(pixel(picture, tile.width + gap, title), (std::vector<int>{128, 128, 128}));
  EXPECT_EQ(pixel(picture, tile.width + gap + factor - 1, second_row), (std::vector<int>{255, 128, 128}));
  EXPECT_EQ(pixel(picture, tile.width + gap + factor, second_row), (std::vector<int>{128, 128, 128}));
  EXPECT_EQ(pixel(picture, tile.width, title), pixel(picture, 0, title + tile.height)) << "gaps have one colour";
}

TEST(PictureTest, LargeTilesKeepTheirSize) {
  const Image picture = draw_picture({{"image", at::zeros({1, 3, 40, 300})}});
  EXPECT_EQ(picture.width, 300);
}

TEST(PictureTest, TitlesDiffer) {
  const auto tiles = at::zeros({1, 3, 4, 4});
  EXPECT_NE(draw_picture({{"mask", tiles}}).pixels, draw_picture({{"image", tiles}}).pixels);
}

TEST(PictureTest, RefusesOtherShapes) {
  const auto images = at::zeros({2, 3, 4, 5});
  for (const auto& wrong : {at::zeros({2, 3, 4, 6}), at::zeros({2, 4, 5}), at::zeros({1, 3, 4, 5})}) {
    EXPECT_THROW(draw_picture({{"a", images}, {"b", wrong}}), std::invalid_argument);
  }
  EXPECT_THROW(draw_picture({{"a", at::zeros({2, 1, 4, 5})}}), std::invalid_argument);
  EXPECT_THROW(draw_picture({}), std::invalid_argument);
}

TEST(TextTest, EachCharacterLooksDifferent) {
  std::set<std::vector<uint8_t>> pictures;
  const std::string characters = "abcdefghijklmnopqrstuvwxyz0123456789.,:-%";
  for (const char character : characters) {
    Image picture({40, 60}, 1);
    draw_text(picture, 5, 5, {std::string(1, character), 30}, {255, 255, 255});
    EXPECT_GT(*std::max_element(picture.pixels.begin(), picture.pixels.end()), 150) << character;
    pictures.insert(picture.pixels);
  }
  EXPECT_EQ(pictures.size(), characters.size());
}

TEST(TextTest, PartsOutsideThePictureAreLeftOut) {
  for (const int place : {-200, -10, 0, 15, 200}) {
    Image picture({20, 20}, 3);
    draw_text(picture, place, place, {"prediction", 16}, {255, 255, 255});
    EXPECT_EQ(picture.size(), (Size{20, 20}));
  }
  EXPECT_EQ(text_width({"", 16}), 0);
}

}  // namespace
}  // namespace gpipe::examples
