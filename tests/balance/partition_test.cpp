#include "balance/cut.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>

#include "balance/cut.h"
#include "balance/profiler.h"
#include "models/unet.h"
#include "skip/context.h"

namespace gpipe {
namespace {

using Cost = std::function<double(int first, int end)>;

constexpr double kForbidden = std::numeric_limits<double>::infinity();

double worst(const Cost& cost, const std::vector<std::int64_t>& sizes) {
  double worst = 0;
  int first = 0;
  for (const auto size : sizes) {
    worst = std::max(worst, cost(first, first + static_cast<int>(size)));
    first += static_cast<int>(size);
  }
  return worst;
}

double brute_force(const Cost& cost, int count, int parts) {
  double best = kForbidden;
  std::vector<std::int64_t> sizes;
  const std::function<void(std::int64_t)> choose = [&](std::int64_t left) {
    const auto parts_left = parts - static_cast<int>(sizes.size());
    if (parts_left == 1) {
      sizes.push_back(left);
      best = std::min(best, worst(cost, sizes));
      sizes.pop_back();
      return;
    }
    for (std::int64_t size = 1; size <= left - parts_left + 1; ++size) {
      sizes.push_back(size);
      choose(left - size);
      sizes.pop_back();
    }
  };
  choose(count);
  return best;
}

void expect_optimal(const Cost& cost, int count, int parts) {
  const auto best = brute_force(cost, count, parts);
  const auto sizes = best_partition(count, parts, cost);
  if (best == kForbidden) {
    ASSERT_TRUE(sizes.empty());
    return;
  }
  ASSERT_EQ(sizes.size(), static_cast<std::size_t>(parts));
  ASSERT_TRUE(std::all_of(sizes.begin(), sizes.end(), [](auto size) { return size > 0; }));
  ASSERT_EQ(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}), count);
  ASSERT_DOUBLE_EQ(worst(cost, sizes), best);
}

TEST(BestPartition, OfSumsMatchesBruteForce) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<double> costs(1 + random() % 9);
    for (auto& cost : costs) cost = random() % 4 == 0 ? 0 : static_cast<double>(random() % 20);
    const int parts = 1 + static_cast<int>(random() % costs.size());
    const Cost sum = [&](int first, int end) {
      return std::accumulate(costs.begin() + first, costs.begin() + end, 0.0);
    };
    expect_optimal(sum, static_cast<int>(costs.size()), parts);
    EXPECT_EQ(best_partition(costs, parts), best_partition(static_cast<int>(costs.size()), parts, sum));
  }
}

TEST(BestPartition, OfAnyCostsMatchesBruteForce) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 3000; ++trial) {
    const int count = 1 + static_cast<int>(random() % 9);
    std::vector<std::vector<double>> costs(count, std::vector<double>(count + 1));
    for (auto& row : costs) {
      for (auto& cost : row) cost = random() % 5 == 0 ? kForbidden : static_cast<double>(random() % 20);
    }
    expect_optimal([&](int first, int end) { return costs[first][end]; }, count,
                   1 + static_cast<int>(random() % count));
  }
}

TEST(BestPartition, PrefersLongEarlyPartsAmongEquals) {
  EXPECT_EQ(best_partition({1, 1, 1, 1, 1}, 3), (std::vector<std::int64_t>{2, 2, 1}));
}

TEST(BestPartition, RefusesInvalidArguments) {
  EXPECT_THROW(best_partition({1, 2}, 0), std::invalid_argument);
  EXPECT_THROW(best_partition({1, 2}, 3), std::invalid_argument);
  EXPECT_THROW(best_partition({1, -2}, 1), std::invalid_argument);
  EXPECT_THROW(best_partition({1, std::nan("")}, 1), std::invalid_argument);
  EXPECT_THROW(best_partition(2, 1, [](int, int) { return std::nan(""); }), std::invalid_argument);
}

/// Knows the bytes of the skips that are stashed and not yet popped.
class LiveSkips : public SkipContext {
 public:
  void stash(const SkipKey& key, at::Tensor tensor) override { skips_[key] = std::move(tensor); }
  at::Tensor pop(const SkipKey& key) override { return skips_.extract(key).mapped(); }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const auto& [key, tensor] : skips_) sum += static_cast<std::int64_t>(tensor.nbytes());
    return sum;
  }

 private:
  std::map<SkipKey, at::Tensor> skips_;
};

TEST(Cut, SendsTheTensorsThatLiveAcrossIt) {
  auto model = models::unet(models::UNetOptions().depth(3).base_channels(4));
  auto x = torch::rand({2, 3, 24, 24});
  const auto cuts = cut_bytes(profile(model, x, ProfileOptions().seconds(0).repeats(1)));
  ASSERT_EQ(cuts.size(), model->size());
  LiveSkips skips;
  const SkipContextGuard guard(skips);
  auto cut = cuts.begin();
  for (auto& layer : *model) {
    x = layer.forward(x);
    const auto live = static_cast<std::int64_t>(x.nbytes()) + skips.bytes();
    EXPECT_EQ(*cut, cut + 1 == cuts.end() ? std::nullopt : std::optional(live)) << cut - cuts.begin();
    ++cut;
  }
}

}  // namespace
}  // namespace gpipe
