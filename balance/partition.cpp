#include "balance/partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace gpipe {

std::vector<std::int64_t> best_partition(int count, int parts, absl::FunctionRef<double(int, int)> cost) {
  if (parts < 1)
    throw std::invalid_argument("[best_partition] parts must be positive, but is " + std::to_string(parts));
  if (count < parts) {
    throw std::invalid_argument("[best_partition] " + std::to_string(count) + " layers cannot be cut into " +
                                std::to_string(parts) + " parts; each needs at least one");
  }
  // of_part[end][first]: cost of the part first..end-1; infinite for all first < earliest[end].
  // worst[end]: cost of the most expensive part in the best cut of 0..end-1 into the parts so far.
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> of_part(count + 1);
  std::vector<int> earliest(count + 1);
  for (int end = 1; end <= count; ++end) {
    for (int first = 0; first < end; ++first) {
      const double value = of_part[end].emplace_back(cost(first, end));
      if (std::isnan(value)) {
        throw std::invalid_argument("[best_partition] the cost of layers " + std::to_string(first) + " to " +
                                    std::to_string(end - 1) + " is not a number");
      }
      if (value == infinity && earliest[end] == first) earliest[end] = first + 1;
    }
  }
  std::vector<double> worst(count + 1, infinity);
  std::vector<std::vector<int>> start(parts, std::vector<int>(count + 1, 0));
  for (int end = 1; end <= count; ++end) worst[end] = of_part[end][0];
  for (int part = 1; part < parts; ++part) {
    std::vector<double> longer(count + 1, infinity);
    for (int end = part + 1; end <= count; ++end) {
      for (int first = end - 1; first >= std::max(part, earliest[end]); --first) {
        const double largest = std::max(worst[first], of_part[end][first]);
        if (largest < longer[end]) {
          longer[end] = largest;
          start[part][end] = first;
        }
      }
    }
    worst = std::move(longer);
  }
  if (worst[count] == infinity) return {};
  std::vector<std::int64_t> sizes(parts);
  for (int part = parts - 1, end = count; part >= 0; --part) {
    const int first = start[part][end];
    sizes[part] = end - first;
    end = first;
  }
  return sizes;
}

std::vector<std::int64_t> best_partition(const std::vector<double>& costs, int parts) {
  std::vector<double> sum_to = {0};
  for (std::size_t i = 0; i < costs.size(); ++i) {
    if (!(costs[i] >= 0) || !std::isfinite(costs[i])) {
      throw std::invalid_argument("[best_partition] cost " + std::to_string(i) + " is " + std::to_string(costs[i]) +
                                  "; costs must be finite and not negative");
    }
    sum_to.push_back(sum_to.back() + costs[i]);
  }
  return best_partition(static_cast<int>(costs.size()), parts,
                        [&](int first, int end) { return sum_to[end] - sum_to[first]; });
}

}  // namespace gpipe
