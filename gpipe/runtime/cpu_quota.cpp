#include "gpipe/runtime/cpu_quota.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

namespace gpipe {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

/// The quota of a control group in a folder: of version 2 or 1. The files have microseconds; "max" and -1 mean no
/// limit.
double quota_of(const std::string& folder, const ReadFile& read) {
  auto text = read(folder + "/cpu.max");
  if (!text) {
    const auto period = read(folder + "/cpu.cfs_period_us");
    text = read(folder + "/cpu.cfs_quota_us").value_or("") + " " + period.value_or("");
  }
  std::istringstream words(*text);
  std::int64_t quota = 0;
  std::int64_t period = 0;
  std::string more;
  if (!(words >> quota >> period) || words >> more || quota <= 0 || period <= 0) return kUnlimited;
  return static_cast<double>(quota) / static_cast<double>(period);
}

/// The minimum quota of a group and its ancestors, up to the mount point. In a container, where the group's path can be
/// the host's, only the mount point may have files.
double min_quota(const std::string& mount, std::string group, const ReadFile& read) {
  double result = quota_of(mount, read);
  while (group.size() > 1) {
    result = std::min(result, quota_of(mount + group, read));
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
  std::istringstream lines(read("/proc/self/cgroup").value_or(""));
  for (std::string number, controllers, group;
       std::getline(lines, number, ':') && std::getline(lines, controllers, ':') && std::getline(lines, group);) {
    if (!group.starts_with('/')) continue;
    if (number == "0" && controllers.empty()) result = std::min(result, min_quota(root, group, read));
    if (("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    for (const auto& mount : {root + "/" + controllers, root + "/cpu"}) {
      result = std::min(result, min_quota(mount, group, read));
    }
  }
  return result;
}

}  // namespace gpipe
