#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "balance/by_time.h"
#include "balance/partition.h"
#include "models/unet.h"

namespace gpipe {
namespace {

double worst(const std::vector<double>& costs, const std::vector<std::int64_t>& sizes) {
  double worst = 0;
  auto next = costs.begin();
  for (const auto size : sizes) {
    worst = std::max(worst, std::accumulate(next, next + size, 0.0));
    next += size;
  }
  return worst;
}

double brute_force(const std::vector<double>& costs, int parts) {
  double best = std::numeric_limits<double>::infinity();
  std::vector<std::int64_t> sizes;
  const std::function<void(std::int64_t)> choose = [&](std::int64_t left) {
    const auto parts_left = parts - static_cast<int>(sizes.size());
    if (parts_left == 1) {
      sizes.push_back(left);
      best = std::min(best, worst(costs, sizes));
      sizes.pop_back();
      return;
    }
    for (std::int64_t size = 1; size <= left - parts_left + 1; ++size) {
      sizes.push_back(size);
      choose(left - size);
      sizes.pop_back();
    }
  };
  choose(static_cast<std::int64_t>(costs.size()));
  return best;
}

TEST(PartitionTest, IsOptimalByBruteForce) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<double> costs(1 + random() % 9);
    for (auto& cost : costs) cost = random() % 4 == 0 ? 0 : static_cast<double>(random() % 20);
    const int parts = 1 + static_cast<int>(random() % costs.size());
    const auto sizes = partition(costs, parts);
    ASSERT_EQ(sizes.size(), static_cast<std::size_t>(parts));
    ASSERT_TRUE(std::all_of(sizes.begin(), sizes.end(), [](auto size) { return size > 0; }));
    ASSERT_EQ(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}), static_cast<std::int64_t>(costs.size()));
    ASSERT_DOUBLE_EQ(worst(costs, sizes), brute_force(costs, parts));
  }
}

TEST(PartitionTest, RefusesWhatCannotBeCut) {
  EXPECT_THROW(partition({1, 2}, 0), std::invalid_argument);
  EXPECT_THROW(partition({1, 2}, 3), std::invalid_argument);
  EXPECT_THROW(partition({1, -2}, 1), std::invalid_argument);
  EXPECT_THROW(partition({1, std::nan("")}, 1), std::invalid_argument);
}

TEST(BalanceByTimeTest, CutsAUNetAndLeavesNoTrace) {
  auto model = models::unet(models::UNetOptions().depth(2).base_channels(4).dropout(0.1));
  model->eval();
  torch::manual_seed(1);
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  std::vector<torch::Tensor> before;
  for (const auto& buffer : model->buffers()) before.push_back(buffer.clone());
  const auto balance = balance_by_time(3, model, torch::rand({2, 3, 16, 16}));
  EXPECT_EQ(balance.size(), 3U);
  EXPECT_EQ(std::accumulate(balance.begin(), balance.end(), std::int64_t{0}), static_cast<std::int64_t>(model->size()));
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(model->buffers()[i], before[i]));
  for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
  for (const auto& module : model->modules()) EXPECT_FALSE(module->is_training());
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), state));
}

}  // namespace
}  // namespace gpipe
