// That no wake-up is lost. A lost one is a thread that sleeps for good: a watchdog wakes it and fails the test.
#include "gpipe/runtime/event_count.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/functional/function_ref.h"

namespace gpipe {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong = std::chrono::hours(24);
constexpr int kRounds = 400;

/// Ends a test in which nothing happens any more: announces, and says so by stuck().
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
  // Counts its own turns and not the time: on a busy machine this thread gets as little of the processor as the others.
  void watch(EventCount& event, const std::atomic<int>& progress) {
    int seen = progress;
    for (int idle = 0; !done_; std::this_thread::sleep_for(milliseconds(10))) {
      idle = std::exchange(seen, progress.load()) == seen ? idle + 1 : 0;
      if (idle < kIdleTurns) continue;
      stuck_ = true;
      event.announce();
    }
  }

  static constexpr int kIdleTurns = 500;
  std::atomic<bool> done_ = false;
  std::atomic<bool> stuck_ = false;
  std::thread thread_;  // last: it uses the others
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

/// Waits for what `holds` says. Lets the other threads run after each look: so what changes the condition often falls
/// between the look and the sleep.
void wait_slowly(EventCount& event, bool with_limit, int yields, absl::FunctionRef<bool()> holds) {
  wait(event, with_limit, [&] {
    const bool is = holds();
    let_others_run(yields);
    return is;
  });
}

class EventStress : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, EventStress, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "AwaitFor" : "Await"; });

TEST_P(EventStress, TwoThreadsThatTakeTurnsLoseNoWakeUp) {
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
  EXPECT_FALSE(watchdog.stuck()) << "a thread slept through the change that it waited for, after " << turn << " turns";
}

TEST_P(EventStress, EveryWaiterIsWoken) {
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
  EXPECT_FALSE(watchdog.stuck()) << "a thread slept through the change that it waited for, in round " << round;
}

TEST_P(EventStress, ASleeperIsCountedBeforeItsLastLook) {
  EventCount event;
  std::atomic<int> looks = 0;
  std::atomic<bool> changed = false;
  std::atomic<bool> announced = false;
  Watchdog watchdog(event, looks);
  std::atomic<bool> ready = false;
  std::thread other([&] {
    ready = true;
    while (looks < 2) std::this_thread::yield();
    changed = true;
    event.announce();
    announced = true;
  });
  while (!ready) std::this_thread::yield();
  wait(event, GetParam(), [&] {
    const bool is = changed || watchdog.stuck();
    // The second look is the last before the sleep. The change comes after it. An announcement that sees no sleeper
    // ends at once; one that sees it waits until it sleeps.
    if (++looks == 2) {
      for (int i = 0; i < 1000 && !announced; ++i) std::this_thread::yield();
    }
    return is;
  });
  other.join();
  EXPECT_FALSE(watchdog.stuck()) << "the announcement did not see the sleeper";
}

TEST(EventCount, AwaitForEndsWithoutTheConditionAndTellsWhetherItHolds) {
  EventCount event;
  EXPECT_FALSE(event.await_for(/*spins=*/0, milliseconds(1), [] { return false; }));
  EXPECT_FALSE(event.await_for(/*spins=*/10, milliseconds(0), [] { return false; }));
  EXPECT_TRUE(event.await_for(/*spins=*/0, milliseconds(0), [] { return true; }));
  int looks = 0;
  EXPECT_TRUE(event.await_for(/*spins=*/0, milliseconds(0), [&] { return ++looks == 2; })) << "the last look counts";
}

}  // namespace
}  // namespace gpipe
