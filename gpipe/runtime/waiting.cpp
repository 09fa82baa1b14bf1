#include "gpipe/runtime/waiting.h"

#include <sched.h>

#include <algorithm>
#include <cassert>
#include <fstream>
#include <limits>
#include <sstream>

namespace gpipe {
namespace {

constexpr int kSpins = 20000;
constexpr int kSpinsPerYield = 128;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool spin(int spins, absl::FunctionRef<bool()> condition) {
  if (condition()) return true;
  for (; spins > 0; --spins) {
    spins % kSpinsPerYield == 0 ? static_cast<void>(sched_yield()) : pause();
    if (condition()) return true;
  }
  return false;
}

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

void EventCount::await(int spins, absl::FunctionRef<bool()> condition) {
  if (spin(spins, condition)) return;
  MutexLock lock(mutex_);
  ++sleepers_;
  while (!condition()) changed_.wait(mutex_);
  --sleepers_;
}

bool EventCount::await_for(int spins, std::chrono::milliseconds time, absl::FunctionRef<bool()> condition) {
  if (spin(spins, condition)) return true;
  const auto end = std::chrono::steady_clock::now() + time;
  MutexLock lock(mutex_);
  ++sleepers_;
  bool holds = condition();
  for (; !holds && std::chrono::steady_clock::now() < end; holds = condition()) changed_.wait_until(mutex_, end);
  --sleepers_;
  return holds;
}

void EventCount::announce() {
  if (sleepers_ == 0) return;
  { MutexLock lock(mutex_); }
  changed_.notify_all();  // not under the mutex, because a woken thread locks it
}

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

int spins_for(int threads, double cpu_quota) {
  cpu_set_t cores;
  // Fails if there are more cores than cpu_set_t can hold.
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 0;
  return threads <= CPU_COUNT(&cores) && threads <= cpu_quota ? kSpins : 0;
}

Channel::Channel(int micro_batches, int spins) : spins_(spins), present_(micro_batches) {}

void Channel::put(int micro_batch) {
  assert(!present_[micro_batch]);
  present_[micro_batch] = true;
  changed_.announce();
}

bool Channel::take(int micro_batch) {
  changed_.await(spins_, [&] { return present_[micro_batch] || cancelled_; });
  return !cancelled_;
}

void Channel::cancel() {
  cancelled_ = true;
  changed_.announce();
}

}  // namespace gpipe
