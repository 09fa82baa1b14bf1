#include "examples/unet/augment.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace gpipe::examples::unet {
namespace {

TEST(AugmentTest, MaskMovesWithTheImage) {
  // The mask covers the pixels that are redder than the background, so that it can be found in the result.
  int mirrored = 0;
  int shifted = 0;
  int recolored = 0;
  constexpr int kDraws = 200;
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    Image image({40, 24}, 3);
    std::fill(image.pixels.begin(), image.pixels.end(), 60);
    Image mask({40, 24}, 1);
    for (int y = 8; y < 16; ++y) {
      for (int x = 8; x < 14; ++x) {
        image.at(x, y)[0] = 190;
        *mask.at(x, y) = 3;
      }
    }
    Random random(seed);
    augment(image, mask, random);
    ASSERT_EQ(image.size(), (Size{40, 24}));
    ASSERT_EQ(mask.size(), (Size{40, 24}));
    const int background = image.at(20, 0)[0];
    int left = 40;
    for (int y = 0; y < 24; ++y) {
      for (int x = 0; x < 40; ++x) {
        ASSERT_EQ(*mask.at(x, y), image.at(x, y)[0] > background ? 3 : 0) << seed;
        if (*mask.at(x, y) != 0) left = std::min(left, x);
      }
    }
    mirrored += left > 18;
    shifted += left != 8 && left != 26;
    recolored += background != 60;
  }
  EXPECT_NEAR(mirrored, kDraws / 2, kDraws / 5);
  EXPECT_GT(shifted, kDraws / 2);
  EXPECT_GT(recolored, kDraws / 2);
}

}  // namespace
}  // namespace gpipe::examples::unet
