#include "balance/partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace gpipe {

std::vector<std::int64_t> partition(const std::vector<double>& costs, int parts) {
  const int n = static_cast<int>(costs.size());
  if (parts < 1) throw std::invalid_argument("[partition] parts must be positive, but is " + std::to_string(parts));
  if (n < parts) {
    throw std::invalid_argument("[partition] " + std::to_string(n) + " layers cannot be cut into " +
                                std::to_string(parts) + " parts; each needs at least one");
  }
  std::vector<double> sum_to(n + 1, 0.0);
  for (int i = 0; i < n; ++i) {
    if (!(costs[i] >= 0) || !std::isfinite(costs[i])) {
      throw std::invalid_argument("[partition] cost " + std::to_string(i) + " is " + std::to_string(costs[i]) +
                                  "; costs are finite and not negative");
    }
    sum_to[i + 1] = sum_to[i] + costs[i];
  }
  // worst[p][i]: the least possible cost of the costliest of p + 1 parts that cover the first i elements; start[p][i]:
  // where the last of them begins.
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> worst(parts, std::vector<double>(n + 1, infinity));
  std::vector<std::vector<int>> start(parts, std::vector<int>(n + 1, 0));
  for (int i = 1; i <= n; ++i) worst[0][i] = sum_to[i];
  for (int p = 1; p < parts; ++p) {
    for (int i = p + 1; i <= n; ++i) {
      for (int j = i - 1; j >= p; --j) {
        const double last = sum_to[i] - sum_to[j];
        const double cost = std::max(worst[p - 1][j], last);
        if (cost < worst[p][i]) {
          worst[p][i] = cost;
          start[p][i] = j;
        }
        if (last >= worst[p][i]) break;  // a longer last part only costs more
      }
    }
  }
  std::vector<std::int64_t> sizes(parts);
  for (int p = parts - 1, end = n; p >= 0; --p) {
    const int begin = p == 0 ? 0 : start[p][end];
    sizes[p] = end - begin;
    end = begin;
  }
  return sizes;
}

}  // namespace gpipe
