// Waiting: event counts, channels, and the CPU time that spinning may take. The stress tests check that no wake-up is
// lost. If one is, a thread sleeps forever: a watchdog then wakes it and fails the test.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gpipe/runtime/waiting.h"

namespace gpipe {
namespace {

using std::chrono::milliseconds;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();
constexpr milliseconds kLong = std::chrono::hours(24);
constexpr int kRounds = 400;

/// Ends a test that stops making progress: sets stuck() and announces.
class Watchdog {
 public:
  Watchdog(EventCount& event, const std::atomic<int>& progress)
      : thread_([this, &event, &progress] { watch(event, progress); }) {}
  ~Watchdog() {
    done_ = true;
    thread_.join();
  }

  bool stuck() const { return stuck_; }

 private:
  // Counts iterations, not time, because a busy machine delays this thread as much as the others.
  void watch(EventCount& event, const std::atomic<int>& progress) {
    int seen = progress;
    for (int idle = 0; !done_; std::this_thread::sleep_for(milliseconds(10))) {
      idle = std::exchange(seen, progress.load()) == seen ? idle + 1 : 0;
      if (idle < kIdleIterations) continue;
      stuck_ = true;
      event.announce();
    }
  }

  static constexpr int kIdleIterations = 500;
  std::atomic<bool> done_ = false;
  std::atomic<bool> stuck_ = false;
  std::thread thread_;  // last, because the thread uses the other members
};

class EventCountStress : public ::testing::TestWithParam<bool> {
 protected:
  void wait(absl::FunctionRef<bool()> condition) {
    if (GetParam()) {
      EXPECT_TRUE(event.await_for(/*spins=*/0, kLong, condition));
    } else {
      event.await(/*spins=*/0, condition);
    }
  }

  /// Waits until holds() is true, or the test is stuck. Lets other threads run after each check, so that the condition
  /// often changes between the check and the sleep.
  void wait_slowly(int yields, absl::FunctionRef<bool()> holds) {
    wait([&] {
      const bool is = holds() || watchdog.stuck();
      for (int i = 0; i < yields; ++i) std::this_thread::yield();
      return is;
    });
  }

  void TearDown() override { EXPECT_FALSE(watchdog.stuck()) << "a wake-up was lost after " << progress << " rounds"; }

  EventCount event;
  std::atomic<int> progress = 0;
  Watchdog watchdog{event, progress};
};
INSTANTIATE_TEST_SUITE_P(, EventCountStress, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "AwaitFor" : "Await"; });

TEST_P(EventCountStress, TwoThreadsTakeTurns) {
  const auto play = [&](int player) {
    for (int round = 0; round < kRounds && !watchdog.stuck(); ++round) {
      wait_slowly(1 + round % 3, [&] { return progress % 2 == player; });
      ++progress;
      event.announce();
    }
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
}

TEST_P(EventCountStress, EveryWaiterIsWoken) {
  constexpr int kWaiters = 3;
  std::atomic<int> arrived = 0;
  std::array<std::thread, kWaiters> waiters;
  for (auto& waiter : waiters) {
    waiter = std::thread([&] {
      for (int wanted = 1; wanted <= kRounds / 4 && !watchdog.stuck(); ++wanted) {
        wait_slowly(1 + wanted % 3, [&] { return progress >= wanted; });
        ++arrived;
        event.announce();
      }
    });
  }
  for (int number = 1; number <= kRounds / 4 && !watchdog.stuck(); ++number) {
    ++progress;
    event.announce();
    wait_slowly(1 + number % 2, [&] { return arrived >= kWaiters * number; });
  }
  for (auto& waiter : waiters) waiter.join();
}

TEST_P(EventCountStress, SleeperIsCountedBeforeItsLastCheck) {
  std::atomic<int> checks = 0;
  std::atomic<bool> changed = false;
  std::atomic<bool> announced = false;
  std::atomic<bool> ready = false;
  std::thread other([&] {
    ready = true;
    while (checks < 2) std::this_thread::yield();
    changed = true;
    event.announce();
    announced = true;
  });
  while (!ready) std::this_thread::yield();
  wait([&] {
    const bool is = changed || watchdog.stuck();
    // The second check is the last one before the sleep. The change comes after it. announce() returns at once if it
    // sees no sleeper; otherwise it waits until this thread sleeps.
    if (++checks == 2) {
      for (int i = 0; i < 1000 && !announced; ++i, ++progress) std::this_thread::yield();
    }
    return is;
  });
  other.join();
}

TEST(EventCount, AwaitForEndsAfterItsTimeAndReturnsWhetherTheConditionHolds) {
  EventCount event;
  EXPECT_FALSE(event.await_for(/*spins=*/0, milliseconds(1), [] { return false; }));
  EXPECT_FALSE(event.await_for(/*spins=*/10, milliseconds(0), [] { return false; }));
  EXPECT_TRUE(event.await_for(/*spins=*/0, milliseconds(0), [] { return true; }));
  int checks = 0;
  EXPECT_TRUE(event.await_for(/*spins=*/0, milliseconds(1), [&] { return ++checks == 3; })) << "the last check counts";
}

TEST(SpinsFor, IsZeroWithoutACoreAndCpuTimePerThread) {
  EXPECT_GT(spins_for(1, kNoLimit), 0);
  EXPECT_GT(spins_for(1, 1.0), 0);
  EXPECT_EQ(spins_for(1, 0.99), 0);
  EXPECT_EQ(spins_for(std::numeric_limits<int>::max(), kNoLimit), 0);
}

TEST(Channel, PutHappensBeforeTake) {
  constexpr int kCount = 2000;
  Channel channel(kCount);
  std::vector<int> data(kCount, 0);
  std::thread producer([&] {
    for (int m = 0; m < kCount; ++m) {
      data[m] = m + 1;
      channel.put(m);
    }
  });
  long sum = 0;
  for (int m = 0; m < kCount; ++m) {
    ASSERT_TRUE(channel.take(m));
    sum += data[m];
  }
  producer.join();
  EXPECT_EQ(sum, kCount * (kCount + 1L) / 2);
}

TEST(Channel, CancelReleasesAConsumerAndEveryTakeFailsThen) {
  Channel channel(2);
  std::thread consumer([&] { EXPECT_FALSE(channel.take(1)); });
  channel.put(0);
  channel.cancel();
  consumer.join();
  channel.cancel();
  EXPECT_FALSE(channel.take(0));
  EXPECT_FALSE(channel.take(1));
}

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
  EXPECT_EQ(v2("max 100000\n"), kNoLimit);
}

TEST(CpuQuota, MalformedFilesCountAsNoLimit) {
  for (const char* text : {"", "\n", "100000", "0 100000", "100000 0", "-1 100000", "100000 -5", "many 100000",
                           "100000 100000 100000", "99999999999999999999999 100000", "1e5 1e5"}) {
    EXPECT_EQ(v2(text), kNoLimit) << text;
  }
  EXPECT_EQ(quota_of({}), kNoLimit);
  for (const char* text : {"", "\n\n", "0", "0:", "0::", "0::group", ":::", "0::/absent", "4:cpu:/absent"}) {
    EXPECT_EQ(quota_of({{"/proc/self/cgroup", text}}), kNoLimit) << text;
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
  EXPECT_EQ(quota_of(files), kNoLimit);
  // In a container the group is mounted at the root, but its path is the host's.
  files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "120000\n";
  EXPECT_EQ(quota_of(files), kNoLimit) << "there is no period";
  files["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "100000\n";
  EXPECT_EQ(quota_of(files), 1.2);
}

TEST(CpuQuota, OfThisProcessIsPositive) { EXPECT_GT(cpu_quota(), 0); }

}  // namespace
}  // namespace gpipe
