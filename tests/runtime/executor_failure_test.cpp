#include "gpipe/runtime/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "gpipe/schedule/generators.h"
#include "tests/runtime/runs.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::action;
using testing::every_kind;
using testing::expect_reference;
using testing::expect_runs;
using testing::expect_success;
using testing::FakeCells;
using testing::Fault;
using testing::gpipe_program;
using ::testing::HasSubstr;
using testing::lists;
using testing::message;
using testing::straight;

TEST(ExecutorFailure, IsReportedForEveryActionAndTheNextRunSucceeds) {
  const auto program = every_kind();
  Executor executor(3);
  std::set<Kind> kinds;
  for (const auto& list : program.schedule()) {
    for (const Action& faulty : list) {
      kinds.insert(faulty.kind);
      FakeCells cells(program, 4);
      cells.on_action = [&](const Action& it) {
        if (it == faulty) throw Fault{it};
      };
      const auto failure = executor.run(program, Part::kAll, cells);
      ASSERT_TRUE(failure) << to_string(faulty);
      EXPECT_EQ(failure->action, faulty);
      try {
        std::rethrow_exception(failure->error);
        FAIL();
      } catch (const Fault& fault) {
        EXPECT_EQ(fault.action, faulty);
      }
      for (int w = 0; w < 3; ++w) {
        const auto& mine = program.schedule()[w];
        ASSERT_LE(cells.ran[w].size(), mine.size());
        EXPECT_TRUE(std::equal(cells.ran[w].begin(), cells.ran[w].end(), mine.begin()));
      }
      EXPECT_EQ(cells.ran[program.layout().placement[faulty.stage]].back(), faulty);
    }
  }
  EXPECT_EQ(kinds.size(), 5);
  expect_runs(executor, program, 4);
}

TEST(ExecutorFailure, StopsDependentActions) {
  const auto program = gpipe_program(3, 8);
  Executor executor(3);
  FakeCells cells(program);
  cells.on_action = [&](const Action& it) {
    if (it == action("1F2")) throw Fault{it};
  };
  const auto failure = executor.run(program, Part::kAll, cells);
  ASSERT_TRUE(failure);
  EXPECT_EQ(cells.ran[1].size(), 3);
  EXPECT_LE(cells.ran[2].size(), 2);
  EXPECT_LE(cells.ran[0].size(), 5);  // 0F3 is on the edge, 0F4 waits to be put
}

TEST(ExecutorFailure, StopsWorkersThatExchangeNothing) {
  const auto program = testing::make(straight(2, 3), {}, fill(straight(2, 3)));
  Executor executor(2);
  FakeCells cells(program);
  // 1F0 fails while 0F1 runs. 0F1 ends after the failure was recorded.
  std::promise<void> running;
  std::promise<void> failed;
  cells.after = [&](int worker) {
    if (worker == 1) failed.set_value();
  };
  cells.on_action = [&](const Action& it) {
    if (it == action("0F1")) {
      running.set_value();
      failed.get_future().wait();
    }
    if (it == action("1F0")) {
      running.get_future().wait();
      throw Fault{it};
    }
  };
  ASSERT_TRUE(executor.run(program, Part::kAll, cells));
  EXPECT_EQ(cells.ran[0].size(), 2);
}

TEST(ExecutorFailure, ReleasesProducersThatWaitForAFullEdge) {
  const auto program = gpipe_program(4, 64);
  Executor executor(4);
  FakeCells cells(program);
  cells.on_action = [&](const Action& it) {
    if (it == action("3F0")) throw Fault{it};
  };
  const auto failure = executor.run(program, Part::kAll, cells);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->action, action("3F0"));
}

TEST(ExecutorFailure, HasNoActionIfTheSetUpThrows) {
  const auto program = gpipe_program(3, 4);
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
  expect_runs(executor, program, 6);
}

TEST(ExecutorFailure, KeepsTheFirstError) {
  const auto program = gpipe_program(3, 4);
  Executor executor(3);
  FakeCells cells(program, 8);
  cells.on_action = [](const Action& it) {
    if (it == action("2B1")) throw Fault{it};
  };
  // Workers 0 and 1 wait for gradients that depend on 2B1, so they get here only after its failure.
  cells.after = [](int worker) { throw std::runtime_error("late, on worker " + std::to_string(worker)); };
  const auto failure = executor.run(program, Part::kAll, cells);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->action, action("2B1"));
  EXPECT_THROW(std::rethrow_exception(failure->error), Fault);
}

TEST(ExecutorFailure, KeepsOneOfSeveralSimultaneousErrors) {
  const auto program = gpipe_program(4, 3);
  Executor executor(4);
  for (int i = 0; i < 50; ++i) {
    FakeCells cells(program);
    cells.before = [](int worker) { throw std::runtime_error("worker " + std::to_string(worker)); };
    const auto failure = executor.run(program, Part::kAll, cells);
    ASSERT_TRUE(failure);
    EXPECT_THAT(message(*failure), HasSubstr("worker "));
  }
  expect_runs(executor, program, 0);
}

/// Calls run_actions() `calls` times on worker 1.
struct MiscountingCells : FakeCells {
  MiscountingCells(const Program& program, int calls) : FakeCells(program), calls_(calls) {}
  void on_worker(int worker, absl::FunctionRef<void()> run_actions) override {
    for (int i = 0; i < (worker == 1 ? calls_ : 1); ++i) run_actions();
  }
  const int calls_;
};

TEST(ExecutorFailure, IsReportedUnlessTheSetUpRunsTheActionsOnce) {
  const auto program = gpipe_program(3, 4);
  Executor executor(3);
  for (const int calls : {0, 2}) {
    MiscountingCells cells(program, calls);
    const auto failure = executor.run(program, Part::kAll, cells);
    ASSERT_TRUE(failure);
    EXPECT_FALSE(failure->action);
    EXPECT_THAT(message(*failure), HasSubstr("run_actions() " + std::to_string(calls) + " times for worker 1"));
  }
}

TEST(ExecutorFailure, CanComeFromThePoll) {
  const auto program = gpipe_program(2, 4);
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

}  // namespace
}  // namespace gpipe
