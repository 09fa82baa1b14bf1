// The executor and its channels.
#include "gpipe/runtime/executor.h"

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "gpipe/base/clock.h"
#include "tests/runtime/fake_cells.h"

namespace gpipe::testing {
namespace {

using ::testing::Pair;

TEST(Executor, RecomputeDoesNotWaitForItsGradient) {
  const auto program = gpipe_program(straight(2, 2), Checkpoint::kAlways);
  Executor executor(2);
  FakeCells cells(program);
  // 1B1 sends the gradient, and here it waits until 0R1 begins. If the R waited for the gradient, it would never begin.
  std::promise<void> recomputing;
  cells.on_action = [&](const Action& it) {
    if (it == action("0R1")) recomputing.set_value();
    if (it != action("1B1")) return;
    if (recomputing.get_future().wait_for(std::chrono::minutes(1)) != std::future_status::ready) {
      throw std::runtime_error("0R1 waits for the gradient");
    }
  };
  expect_success(executor.run(program, Part::kAll, cells));
  expect_reference(program, cells);
}

// A worker may wait in an action for another rank, which the runner must release.
TEST(ExecutorFailure, IsToldToTheRunnerWhileActionsRun) {
  struct WaitingCells : FakeCells {
    using FakeCells::FakeCells;
    void cancel(const Failure& failure) noexcept override { told.set_value(*failure.action); }
    std::promise<Action> told;
  };
  const auto program = gpipe_program(straight(2, 2));
  Executor executor(2);
  WaitingCells cells(program);
  auto told = cells.told.get_future();
  cells.on_action = [&](const Action& it) {
    if (it == action("1F0")) throw Fault{it};
    if (it == action("0F1")) EXPECT_EQ(told.wait_for(std::chrono::minutes(1)), std::future_status::ready);
  };
  ASSERT_TRUE(executor.run(program, Part::kAll, cells));
  ASSERT_EQ(told.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_EQ(told.get(), action("1F0"));
}

TEST(ExecutorFailure, HasNoActionIfTheSetUpThrows) {
  const auto program = gpipe_program(straight(3, 4));
  Executor executor(3);
  for (int faulty = 0; faulty < 3; ++faulty) {
    for (const bool before : {true, false}) {
      FakeCells cells(program, 6);
      (before ? cells.before : cells.after) = [&](int worker) {
        if (worker == faulty) throw std::out_of_range("set-up of worker " + std::to_string(worker));
      };
      const auto failure = executor.run(program, Part::kAll, cells);
      ASSERT_TRUE(failure);
      EXPECT_FALSE(failure->action);
      EXPECT_THROW(std::rethrow_exception(failure->error), std::out_of_range);
      EXPECT_EQ(message(*failure), "set-up of worker " + std::to_string(faulty));
      EXPECT_EQ(cells.ran[faulty].empty(), before);
    }
  }
  FakeCells cells(program);
  expect_success(executor.run(program, Part::kAll, cells));
  expect_reference(program, cells);
}

TEST(ExecutorFailure, KeepsTheFirstErrorAndTheTraceOfWhatEnded) {
  const auto program = gpipe_program(straight(3, 4));
  Executor executor(3);
  FakeCells cells(program, 8);
  cells.on_action = [](const Action& it) {
    if (it == action("2B1")) throw Fault{it};
  };
  // Workers 0 and 1 wait for gradients that depend on 2B1, so they get here only after its failure.
  cells.after = [](int worker) { throw std::runtime_error("late, on worker " + std::to_string(worker)); };
  Timeline timeline;
  const auto failure = executor.run(program, Part::kAll, cells, &timeline, 7);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->action, action("2B1"));
  EXPECT_THROW(std::rethrow_exception(failure->error), Fault);
  std::string ended;
  for (const Span& span : timeline.spans) {
    EXPECT_EQ(span.step, 7);
    if (span.worker == 2) ended += to_string(span.action) + " ";
  }
  EXPECT_EQ(ended, "2F0 2F1 2F2 2F3 2B3 2R2 2B2 2R1 ");
}

TEST(ExecutorFailure, CanComeFromThePoll) {
  const auto program = gpipe_program(straight(2, 4));
  int polls = 0;
  std::set<std::thread::id> threads;
  Executor executor(2, [&] {
    threads.insert(std::this_thread::get_id());
    if (++polls == 2) throw Fault{};
  });
  FakeCells cells(program);
  // 0F1 ends after the failure was recorded: worker 1 waits for 0F1 until then.
  std::promise<void> failed;
  cells.after = [&](int worker) {
    if (worker == 1) failed.set_value();
  };
  cells.on_action = [&](const Action& it) {
    if (it == action("0F1")) failed.get_future().wait();
  };
  const auto failure = executor.run(program, Part::kAll, cells);
  ASSERT_TRUE(failure);
  EXPECT_FALSE(failure->action);
  EXPECT_THROW(std::rethrow_exception(failure->error), Fault);
  EXPECT_EQ(threads, std::set{std::this_thread::get_id()});
  EXPECT_EQ(cells.ran[0], lists({"0F0 0F1"})[0]);
  FakeCells others(program);
  expect_success(executor.run(program, Part::kAll, others));
  expect_reference(program, others);
}

/// An object of a layer that exit() destroys.
struct OfLayer {
  ~OfLayer() {
    is_gone = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  static inline std::atomic<bool> is_gone = false;
};

[[noreturn]] void run_until_exit(const std::function<void(int action)>& on_action) {
  const auto program = gpipe_program(straight(2, 4));
  static Executor executor(2);
  std::atomic<int> count = 0;
  for (;;) {
    FakeCells cells(program);
    cells.on_action = [&](const Action&) {
      static const OfLayer of_layer;
      if (OfLayer::is_gone) std::abort();
      on_action(++count);
    };
    executor.run(program, Part::kAll, cells);
  }
}

TEST(ExecutorDeathTest, ExitEndsRunsBeforeItDestroysWhatTheyUse) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto on_worker = [](int action) {
    if (action == 100) std::exit(7);
  };
  EXPECT_EXIT(run_until_exit(on_worker), ::testing::ExitedWithCode(7), "");
  const auto on_other_thread = [](int action) {
    if (action == 100) std::thread([] { std::exit(7); }).detach();
  };
  EXPECT_EXIT(run_until_exit(on_other_thread), ::testing::ExitedWithCode(7), "");
}

TEST(ExecutorTrace, HasEveryActionOnceInOrder) {
  const auto layout = straight(3, 4);
  const auto program = plain_program(layout, make_schedule("zb_h1", layout, Checkpoint::kAlways));
  Executor executor(3);
  Timeline timeline;
  for (const int step : {0, 1}) {
    FakeCells cells(program, 3);
    expect_success(executor.run(program, Part::kAll, cells, &timeline, step));
  }
  EXPECT_EQ(timeline.workers, 3);
  EXPECT_EQ(timeline.edges.size(), program.edges().size());
  std::vector<double> clocks(3);
  std::map<int, Schedule> ran;  // by step
  for (const Span& span : timeline.spans) {
    double& clock = clocks[span.worker];
    EXPECT_GE(span.start - span.lead, clock);
    EXPECT_GE(span.end, span.start);
    EXPECT_LE(span.queued + span.blocked, span.end - span.start + span.lead);
    clock = span.end;
    ran[span.step].resize(3);
    ran[span.step][span.worker].push_back(span.action);
  }
  EXPECT_THAT(ran, ElementsAre(Pair(0, program.schedule()), Pair(1, program.schedule())));
}

TEST(ExecutorTrace, TellsSleepFromWorkAndFromTheWaitForAnInput) {
  const auto program = gpipe_program(straight(2, 1), Checkpoint::kNever);
  Executor executor(2);
  FakeCells cells(program);
  const double nap = 0.02;
  cells.on_action = [&](const Action& it) {
    if (it == action("0F0")) std::this_thread::sleep_for(std::chrono::duration<double>(nap));
    const double start = now();
    while (it == action("1F0") && now() < start + nap) {
    }
  };
  Timeline timeline;
  expect_success(executor.run(program, Part::kAll, cells, &timeline));
  const auto span_of = [&](const std::string& it) {
    return *std::ranges::find(timeline.spans, action(it), &Span::action);
  };
  EXPECT_GE(span_of("0F0").blocked, 0.99 * nap);
  EXPECT_LT(span_of("1F0").blocked, 0.99 * nap);
  EXPECT_GE(span_of("1F0").start - span_of("1F0").lead, span_of("0F0").end);  // the input had not come before
}

TEST(Channel, CancelReleasesAConsumerAndEveryTakeFailsThen) {
  Channel channel(2);
  auto taken = std::async(std::launch::async, [&] { return channel.take(1); });
  channel.put(0);
  channel.cancel();
  EXPECT_EQ(taken.wait_for(std::chrono::minutes(1)), std::future_status::ready);
  channel.put(1);  // releases the consumer if the cancel has not
  EXPECT_FALSE(taken.get());
  channel.cancel();
  EXPECT_FALSE(channel.take(0));
  EXPECT_FALSE(channel.take(1));
}

}  // namespace
}  // namespace gpipe::testing
