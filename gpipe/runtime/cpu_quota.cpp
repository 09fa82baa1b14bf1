#include "gpipe/runtime/cpu_quota.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <tuple>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace gpipe {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

/// Both arguments are in microseconds; the quota is per period. "max" and -1 mean no limit.
double cpus(absl::string_view quota, absl::string_view period) {
  std::int64_t quota_us = 0;
  std::int64_t period_us = 0;
  if (!absl::SimpleAtoi(quota, &quota_us) || !absl::SimpleAtoi(period, &period_us)) return kUnlimited;
  return quota_us > 0 && period_us > 0 ? static_cast<double>(quota_us) / static_cast<double>(period_us) : kUnlimited;
}

double quota_v2(const std::string& folder, const ReadFile& read) {
  const auto text = read(folder + "/cpu.max");
  if (!text) return kUnlimited;
  const std::vector<absl::string_view> words = absl::StrSplit(*text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
  return words.size() == 2 ? cpus(words[0], words[1]) : kUnlimited;
}

double quota_v1(const std::string& folder, const ReadFile& read) {
  const auto quota = read(folder + "/cpu.cfs_quota_us");
  const auto period = read(folder + "/cpu.cfs_period_us");
  return quota && period ? cpus(*quota, *period) : kUnlimited;
}

/// The minimum quota of a group and its ancestors, up to the mount point. In a container the group's path can be the
/// host's although only the container's own group is mounted. Then only the mount point has files.
template <typename Quota>
double min_quota(const std::string& mount, std::string group, const ReadFile& read, Quota quota) {
  double result = quota(mount, read);
  while (group.size() > 1) {
    result = std::min(result, quota(mount + group, read));
    group.resize(std::min(group.size(), group.rfind('/')));
  }
  return result;
}

std::optional<std::string> read_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace

double cpu_quota() { return cpu_quota(read_file); }

double cpu_quota(const ReadFile& read) {
  const std::string root = "/sys/fs/cgroup";
  double result = kUnlimited;
  // Lines such as "0::/group" for version 2, "4:cpu,cpuacct:/group" for version 1.
  const auto groups = read("/proc/self/cgroup").value_or("");
  for (const absl::string_view line : absl::StrSplit(groups, '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || parts[2].empty() || parts[2].front() != '/') continue;
    const auto& [controllers, group] = std::tie(parts[1], parts[2]);
    if (parts[0] == "0" && controllers.empty()) result = std::min(result, min_quota(root, group, read, quota_v2));
    const std::vector<absl::string_view> names = absl::StrSplit(controllers, ',');
    if (std::find(names.begin(), names.end(), "cpu") == names.end()) continue;
    for (const auto& mount : {root + "/" + controllers, root + "/cpu"}) {
      result = std::min(result, min_quota(mount, group, read, quota_v1));
    }
  }
  return result;
}

}  // namespace gpipe
