// How a mini-batch is cut into micro-batches and joined again.
#include "gpipe/run/micro_batch.h"

#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

using Sizes = std::vector<std::int64_t>;

TEST(MicroBatch, SizesAreEqualExceptForTheLast) {
  EXPECT_EQ(micro_batch_sizes(10, 4, 0), (Sizes{3, 3, 3, 1}));
  EXPECT_EQ(micro_batch_sizes(9, 4, 0), (Sizes{3, 3, 3})) << "there may be fewer micro-batches than chunks";
  EXPECT_EQ(micro_batch_sizes(2, 5, 0), (Sizes{1, 1}));
  EXPECT_EQ(micro_batch_sizes(0, 5, 0), (Sizes{0}));
  EXPECT_EQ(micro_batch_sizes(10, 1, 4), (Sizes{4, 4, 2})) << "samples per micro-batch are given";
}

TEST(MicroBatch, SizesRequirePositiveNumbers) {
  EXPECT_THAT([] { micro_batch_sizes(4, 0, 0); }, refused("chunks must be positive, but is 0"));
  EXPECT_THAT([] { micro_batch_sizes(4, 1, -2); }, refused("micro-batches of -2 samples"));
  EXPECT_THAT([] { micro_batch_sizes(-4, 1, 0); }, refused("a mini-batch of -4 samples"));
}

TEST(MicroBatch, SizesDoNotOverflow) {
  constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(micro_batch_sizes(kHuge, 2, 0).back(), kHuge / 2);
  EXPECT_EQ(micro_batch_sizes(kHuge, 1, kHuge), Sizes{kHuge});
}

TEST(MicroBatch, PartsAreViewsWithTheirOwnVersionCounters) {
  const auto whole = torch::arange(6).view({3, 2});
  const auto parts = scatter(whole, {2, 1});
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_TRUE(torch::equal(parts[0].tensors[0], whole.narrow(0, 0, 2)));
  EXPECT_TRUE(torch::equal(parts[1].tensors[0], whole.narrow(0, 2, 1)));
  parts[1].tensors[0].zero_();
  EXPECT_EQ(whole.sum().item<int>(), 0 + 1 + 2 + 3) << "they share the input's memory";
  EXPECT_FALSE(parts[0].changed());
  EXPECT_TRUE(parts[1].changed());
}

TEST(MicroBatch, AMissingGradientIsZeroInTheSizeOfItsPart) {
  const auto ones = [](std::int64_t samples) { return torch::ones({samples, 2}); };
  EXPECT_TRUE(torch::equal(gather_gradient({ones(3), Tensor(), ones(1)}, {3, 3, 1}),
                           torch::cat({ones(3), torch::zeros({3, 2}), ones(1)})));
  EXPECT_TRUE(torch::equal(gather_gradient({ones(3), Tensor()}, {3, 1}), torch::cat({ones(3), torch::zeros({1, 2})})));
  EXPECT_TRUE(torch::equal(gather_gradient({Tensor(), ones(1)}, {3, 1}), torch::cat({torch::zeros({3, 2}), ones(1)})));
  EXPECT_FALSE(gather_gradient({Tensor(), Tensor()}, {3, 1}).defined());
}

}  // namespace
}  // namespace gpipe
