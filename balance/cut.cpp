#include "balance/cut.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "balance/partition.h"

namespace gpipe {
namespace {

constexpr double kForbidden = std::numeric_limits<double>::infinity();

std::vector<std::int64_t> cut(const StageCost& stage, int partitions, absl::FunctionRef<double(int, int)> cost) {
  check_stages(partitions, stage.layers());
  return best_partition(stage.layers(), partitions, [&](int first, int end) {
    const bool allowed = stage.can_cut_before(first) && stage.can_cut_before(end);
    return allowed ? cost(first, end) : kForbidden;
  });
}

[[noreturn]] void refuse(int partitions) {
  throw std::invalid_argument(
      absl::StrFormat("[balance] %d stages would separate layers that share a buffer or parameter; use fewer "
                      "stages, or give each layer its own",
                      partitions));
}

std::int64_t most_bytes(const StageCost& stage, const std::vector<std::int64_t>& balance, const RunOptions& options) {
  std::int64_t most = 0;
  int first = 0;
  for (const int end : stage.ends(balance)) {
    most = std::max(most, stage.bytes(first, end, options));
    first = end;
  }
  return most;
}

}  // namespace

void check_stages(int stages, int layers) {
  if (stages >= 1 && stages <= layers) return;
  throw std::invalid_argument(absl::StrFormat(
      "[balance] the number of stages must be between 1 and the number of layers, %d, but is %d", layers, stages));
}

std::vector<std::int64_t> balance_by_time(const Profile& profile, int partitions, const RunOptions& options) {
  const StageCost stage(profile);
  stage.check(options);
  auto balance = cut(stage, partitions, [&](int first, int end) { return stage.seconds(first, end, options); });
  if (balance.empty()) refuse(partitions);
  return balance;
}

// StageCost::bytes() is slow, so stages whose lower bound exceeds a limit are skipped. If the best balance of the other
// stages is within the limit, it is the best of all. Otherwise the limit is raised and the search repeated.
std::vector<std::int64_t> balance_by_size(const Profile& profile, int partitions, const RunOptions& options) {
  const StageCost stage(profile);
  stage.check(options);
  const auto whole = stage.least_bytes(0, stage.layers(), options);
  auto limit = whole / std::max(1, partitions);
  for (;;) {
    auto balance = cut(stage, partitions, [&](int first, int end) {
      const bool too_large = stage.least_bytes(first, end, options) > limit;
      return too_large ? kForbidden : static_cast<double>(stage.bytes(first, end, options));
    });
    const bool all_considered = limit >= whole;
    if (balance.empty()) {
      if (all_considered) refuse(partitions);
      limit = 2 * limit + 1;
      continue;
    }
    const auto worst = most_bytes(stage, balance, options);
    if (all_considered || worst <= limit) return balance;
    limit = worst;
  }
}

std::vector<std::int64_t> balance_within(std::int64_t bytes, const Profile& profile, int partitions,
                                         const RunOptions& options) {
  const StageCost stage(profile);
  stage.check(options);
  return cut(stage, partitions, [&](int first, int end) {
    const bool fits = stage.least_bytes(first, end, options) <= bytes && stage.bytes(first, end, options) <= bytes;
    return fits ? stage.seconds(first, end, options) : kForbidden;
  });
}

std::vector<std::optional<std::int64_t>> cut_bytes(const Profile& profile) {
  const StageCost stage(profile);
  const int layers = stage.layers();
  std::vector<std::optional<std::int64_t>> bytes(layers);
  for (int next = 1; next < layers; ++next) {
    if (stage.can_cut_before(next)) bytes[next - 1] = stage.bytes_in(next, layers);
  }
  return bytes;
}

}  // namespace gpipe
