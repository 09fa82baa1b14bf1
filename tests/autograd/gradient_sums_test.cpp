// A sum is changed in place only if no other tensor shares its memory.
#include "gpipe/autograd/boundary.h"

#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

Tensor full(double value) { return torch::full({2, 3}, value); }

TEST(GradientSums, StayApartIfTheyBeganWithOneTensor) {
  for (const bool viewed : {false, true}) {
    GradientSums sums(2);
    const auto shared = full(1);
    sums.add(0, shared);
    sums.add(1, viewed ? shared.view({3, 2}) : shared);
    sums.add(0, full(10));
    sums.add(1, viewed ? full(100).view({3, 2}) : full(100));
    EXPECT_TRUE(same(shared, full(1))) << "the caller's gradient must not change";
    const auto taken = sums.take();
    EXPECT_TRUE(same(taken[0], full(11)));
    EXPECT_TRUE(same(taken[1].view({2, 3}), full(101)));
  }
}

TEST(GradientSums, AreNotAddedInPlaceToAnExpandedGradient) {
  GradientSums sums(1);
  sums.add(0, torch::ones({1, 3}).expand({2, 3}));
  sums.add(0, full(1));
  EXPECT_TRUE(same(sums.take()[0], full(2)));
}

TEST(GradientSums, ReuseTheirOwnMemory) {
  GradientSums sums(1);
  auto first = full(1);
  const auto* memory = first.data_ptr();
  sums.add(0, std::move(first));
  sums.add(0, full(2));
  const auto sum = sums.take()[0];
  EXPECT_TRUE(same(sum, full(3)));
  EXPECT_EQ(sum.data_ptr(), memory);
}

TEST(GradientSums, TakeUndefinedSparseAndDenseGradients) {
  GradientSums sums(3);
  sums.add(0, Tensor());
  sums.add(1, full(2).to_sparse());
  sums.add(1, full(3));
  sums.add(2, full(3));
  sums.add(2, full(2).to_sparse());
  const auto taken = sums.take();
  EXPECT_FALSE(taken[0].defined());
  EXPECT_TRUE(same(taken[1], full(5)));
  EXPECT_TRUE(same(taken[2], full(5)));
}

}  // namespace
}  // namespace gpipe
