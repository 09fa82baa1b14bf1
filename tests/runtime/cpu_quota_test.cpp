#include "gpipe/runtime/cpu_quota.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <optional>
#include <string>

namespace gpipe {
namespace {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

using Files = std::map<std::string, std::string>;

double quota_of(const Files& files) {
  return cpu_quota([&](const std::string& path) -> std::optional<std::string> {
    const auto found = files.find(path);
    return found == files.end() ? std::nullopt : std::optional(found->second);
  });
}

double v2(const std::string& cpu_max) {
  return quota_of({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/cpu.max", cpu_max}});
}

TEST(CpuQuota, ReadsVersion2) {
  EXPECT_EQ(v2("150000 100000\n"), 1.5);
  EXPECT_EQ(v2("400000 200000"), 2);
  EXPECT_EQ(v2("max 100000\n"), kUnlimited);
}

TEST(CpuQuota, MalformedFilesCountAsNoLimit) {
  for (const char* text : {"", "\n", "100000", "0 100000", "100000 0", "-1 100000", "100000 -5", "many 100000",
                           "100000 100000 100000", "99999999999999999999999 100000", "1e5 1e5"}) {
    EXPECT_EQ(v2(text), kUnlimited) << text;
  }
  EXPECT_EQ(quota_of({}), kUnlimited);
  for (const char* text : {"", "\n\n", "0", "0:", "0::", "0::group", ":::", "0::/absent", "4:cpu:/absent"}) {
    EXPECT_EQ(quota_of({{"/proc/self/cgroup", text}}), kUnlimited) << text;
  }
}

TEST(CpuQuota, IsTheMinimumOverTheGroupAndItsAncestors) {
  Files files = {{"/proc/self/cgroup", "0::/user.slice/a:b/job\n"},
                 {"/sys/fs/cgroup/user.slice/a:b/job/cpu.max", "300000 100000\n"},
                 {"/sys/fs/cgroup/user.slice/a:b/cpu.max", "max 100000\n"},
                 {"/sys/fs/cgroup/other/cpu.max", "10000 100000\n"}};
  EXPECT_EQ(quota_of(files), 3);
  files["/sys/fs/cgroup/user.slice/cpu.max"] = "50000 100000\n";
  EXPECT_EQ(quota_of(files), 0.5);
}

TEST(CpuQuota, ReadsVersion1) {
  Files files = {{"/proc/self/cgroup", "5:memory:/memory\n4:cpu,cpuacct:/jobs/one\n1:name=systemd:/\n0::/\n"},
                 {"/sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_quota_us", "250000\n"},
                 {"/sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_period_us", "100000\n"}};
  EXPECT_EQ(quota_of(files), 2.5);
  files["/sys/fs/cgroup/cpu,cpuacct/jobs/one/cpu.cfs_quota_us"] = "-1\n";
  EXPECT_EQ(quota_of(files), kUnlimited);
  // In a container the group is mounted at the root, but its path is the host's.
  files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "120000\n";
  EXPECT_EQ(quota_of(files), kUnlimited) << "there is no period";
  files["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "100000\n";
  EXPECT_EQ(quota_of(files), 1.2);
}

TEST(CpuQuota, OfThisProcessIsPositive) { EXPECT_GT(cpu_quota(), 0); }

}  // namespace
}  // namespace gpipe
