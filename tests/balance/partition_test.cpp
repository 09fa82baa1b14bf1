// The best cut into parts, against all cuts.
#include <cmath>
#include <functional>
#include <limits>

#include "gpipe/partition.h"
#include "tests/support/matchers.h"

namespace gpipe {
namespace {

using Cost = std::function<double(int first, int end)>;

constexpr double kForbidden = std::numeric_limits<double>::infinity();

/// The cost of the most expensive part in the best cut of first..end-1.
double brute_force(const Cost& cost, int first, int end, int parts) {
  if (parts == 1) return cost(first, end);
  double best = kForbidden;
  for (int next = first + 1; next <= end - parts + 1; ++next) {
    best = std::min(best, std::max(cost(first, next), brute_force(cost, next, end, parts - 1)));
  }
  return best;
}

TEST(BestPartition, MatchesBruteForce) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 3000; ++trial) {
    const int count = 1 + static_cast<int>(random() % 9);
    const int parts = 1 + static_cast<int>(random() % count);
    std::vector<std::vector<double>> costs(count, std::vector<double>(count + 1));
    for (auto& row : costs) {
      for (auto& cost : row) cost = random() % 5 == 0 ? kForbidden : static_cast<double>(random() % 20);
    }
    const auto cost = [&](int first, int end) { return costs[first][end]; };
    const auto best = brute_force(cost, 0, count, parts);
    const auto sizes = best_partition(count, parts, [&](int, int first, int end) { return cost(first, end); });
    ASSERT_EQ(sizes.size(), best == kForbidden ? 0U : static_cast<std::size_t>(parts));
    double worst = 0;
    int first = 0;
    for (const auto size : sizes) {
      ASSERT_GT(size, 0);
      const int end = first + static_cast<int>(size);
      worst = std::max(worst, cost(first, end));
      first = end;
    }
    if (sizes.empty()) continue;
    ASSERT_EQ(first, count);
    ASSERT_EQ(worst, best);
  }
}

TEST(BestPartition, PrefersLongEarlyPartsAmongEqualsAndRefusesInvalidArguments) {
  const auto length = [](int, int first, int end) { return end - first; };
  EXPECT_EQ(best_partition(5, 3, length), (std::vector<std::int64_t>{2, 2, 1}));
  EXPECT_THROW(best_partition(2, 0, length), std::invalid_argument);
  EXPECT_THROW(best_partition(2, 3, length), std::invalid_argument);
  EXPECT_THROW(best_partition(2, 1, [](int, int, int) { return std::nan(""); }), std::invalid_argument);
}

}  // namespace
}  // namespace gpipe
