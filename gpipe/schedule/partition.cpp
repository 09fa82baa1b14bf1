#include "gpipe/partition.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gpipe/base/checks.h"

namespace gpipe {

std::vector<std::int64_t> best_partition(int count, int parts, const std::function<double(int, int, int)>& cost) {
  if (parts < 1) refuse_argument("parts must be positive, but is ", parts);
  if (count < parts) refuse_argument(count, " layers cannot be cut into ", parts, " parts; each needs at least one");
  // worst[end]: cost of the most expensive part in the best cut of 0..end-1 into the parts so far.
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<double> worst(count + 1, infinity);
  worst[0] = 0;
  std::vector<std::vector<int>> start(parts, std::vector<int>(count + 1, 0));
  for (int part = 0; part < parts; ++part) {
    std::vector<double> longer(count + 1, infinity);
    const bool is_last = part + 1 == parts;
    for (int end = is_last ? count : part + 1; end <= count; ++end) {
      for (int first = part == 0 ? 0 : end - 1; first >= part; --first) {
        if (worst[first] >= longer[end]) continue;
        const double of_part = cost(part, first, end);
        if (std::isnan(of_part)) refuse_argument("the cost of layers ", first, " to ", end - 1, " is not a number");
        const double largest = std::max(worst[first], of_part);
        if (largest >= longer[end]) continue;
        longer[end] = largest;
        start[part][end] = first;
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

}  // namespace gpipe
