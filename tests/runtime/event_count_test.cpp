// The stress tests check that no wake-up is lost. If one is, a thread sleeps forever: a watchdog then wakes it and
// fails the test.
#include "gpipe/runtime/event_count.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"

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

void wait(EventCount& event, bool with_limit, absl::FunctionRef<bool()> condition) {
  if (with_limit) {
    EXPECT_TRUE(event.await_for(/*spins=*/0, kLong, condition));
  } else {
    event.await(/*spins=*/0, condition);
  }
}

void let_others_run(int times) {
  for (int i = 0; i < times; ++i) std::this_thread::yield();
}

/// Waits until holds() is true. Lets other threads run after each check, so that the condition often changes between
/// the check and the sleep.
void wait_slowly(EventCount& event, bool with_limit, int yields, absl::FunctionRef<bool()> holds) {
  wait(event, with_limit, [&] {
    const bool is = holds();
    let_others_run(yields);
    return is;
  });
}

class EventCountStress : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, EventCountStress, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "AwaitFor" : "Await"; });

TEST_P(EventCountStress, TwoThreadsTakeTurns) {
  EventCount event;
  std::atomic<int> turn = 0;
  Watchdog watchdog(event, turn);
  const auto play = [&](int player) {
    for (int round = 0; round < kRounds && !watchdog.stuck(); ++round) {
      wait_slowly(event, GetParam(), 1 + round % 3, [&] { return turn % 2 == player || watchdog.stuck(); });
      ++turn;
      event.announce();
    }
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
  EXPECT_FALSE(watchdog.stuck()) << "a wake-up was lost after " << turn << " turns";
}

TEST_P(EventCountStress, EveryWaiterIsWoken) {
  constexpr int kWaiters = 3;
  EventCount event;
  std::atomic<int> round = 0;
  std::atomic<int> arrived = 0;
  Watchdog watchdog(event, round);
  std::array<std::thread, kWaiters> waiters;
  for (auto& waiter : waiters) {
    waiter = std::thread([&] {
      for (int wanted = 1; wanted <= kRounds / 4 && !watchdog.stuck(); ++wanted) {
        wait_slowly(event, GetParam(), 1 + wanted % 3, [&] { return round >= wanted || watchdog.stuck(); });
        ++arrived;
        event.announce();
      }
    });
  }
  for (int number = 1; number <= kRounds / 4 && !watchdog.stuck(); ++number) {
    ++round;
    event.announce();
    wait_slowly(event, GetParam(), 1 + number % 2, [&] { return arrived >= kWaiters * number || watchdog.stuck(); });
  }
  for (auto& waiter : waiters) waiter.join();
  EXPECT_FALSE(watchdog.stuck()) << "a wake-up was lost in round " << round;
}

TEST_P(EventCountStress, SleeperIsCountedBeforeItsLastCheck) {
  EventCount event;
  std::atomic<int> checks = 0;
  std::atomic<bool> changed = false;
  std::atomic<bool> announced = false;
  std::atomic<int> progress = 0;
  Watchdog watchdog(event, progress);
  std::atomic<bool> ready = false;
  std::thread other([&] {
    ready = true;
    while (checks < 2) std::this_thread::yield();
    changed = true;
    event.announce();
    announced = true;
  });
  while (!ready) std::this_thread::yield();
  wait(event, GetParam(), [&] {
    const bool is = changed || watchdog.stuck();
    // The second check is the last one before the sleep. The change comes after it. announce() returns at once if it
    // sees no sleeper; otherwise it waits until this thread sleeps.
    if (++checks == 2) {
      for (int i = 0; i < 1000 && !announced; ++i, ++progress) std::this_thread::yield();
    }
    return is;
  });
  other.join();
  EXPECT_FALSE(watchdog.stuck()) << "announce() did not see the sleeper";
}

TEST(EventCount, AwaitForEndsAfterItsTimeAndReturnsWhetherTheConditionHolds) {
  EventCount event;
  EXPECT_FALSE(event.await_for(/*spins=*/0, milliseconds(1), [] { return false; }));
  EXPECT_FALSE(event.await_for(/*spins=*/10, milliseconds(0), [] { return false; }));
  EXPECT_TRUE(event.await_for(/*spins=*/0, milliseconds(0), [] { return true; }));
  int checks = 0;
  EXPECT_TRUE(event.await_for(/*spins=*/0, milliseconds(0), [&] { return ++checks == 2; })) << "the last check counts";
}

TEST(SpinsFor, IsZeroWithoutACoreAndCpuTimePerThread) {
  EXPECT_GT(spins_for(1, kNoLimit), 0);
  EXPECT_GT(spins_for(1, 1.0), 0);
  EXPECT_EQ(spins_for(1, 0.99), 0);
  EXPECT_EQ(spins_for(std::numeric_limits<int>::max(), kNoLimit), 0);
}

}  // namespace
}  // namespace gpipe
