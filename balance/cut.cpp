#include "balance/cut.h"

#include <limits>
#include <stdexcept>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_format.h"
#include "balance/partition.h"

namespace gpipe {
namespace {

constexpr double kForbidden = std::numeric_limits<double>::infinity();

std::vector<std::int64_t> cut(const StageCost& stage, int partitions, absl::FunctionRef<double(int, int)> cost) {
  return best_partition(stage.layers(), partitions, [&](int first, int end) {
    const bool allowed = stage.can_cut_before(first) && stage.can_cut_before(end);
    return allowed ? cost(first, end) : kForbidden;
  });
}

std::vector<std::int64_t> cut_or_refuse(const StageCost& stage, int partitions,
                                        absl::FunctionRef<double(int, int)> cost) {
  auto balance = cut(stage, partitions, cost);
  if (!balance.empty()) return balance;
  throw std::invalid_argument(absl::StrFormat(
      "[balance] %d partitions would part layers that share a parameter; ask for fewer, or untie them", partitions));
}

}  // namespace

std::vector<std::int64_t> balance_by_time(const Profile& profile, int partitions, const RunOptions& options) {
  const StageCost stage(profile);
  return cut_or_refuse(stage, partitions, [&](int first, int end) { return stage.seconds(first, end, options); });
}

std::vector<std::int64_t> balance_by_size(const Profile& profile, int partitions, const RunOptions& options) {
  const StageCost stage(profile);
  return cut_or_refuse(stage, partitions,
                       [&](int first, int end) { return static_cast<double>(stage.bytes(first, end, options)); });
}

std::vector<std::int64_t> balance_within(std::int64_t bytes, const Profile& profile, int partitions,
                                         const RunOptions& options) {
  const StageCost stage(profile);
  return cut(stage, partitions, [&](int first, int end) {
    return stage.bytes(first, end, options) <= bytes ? stage.seconds(first, end, options) : kForbidden;
  });
}

}  // namespace gpipe
