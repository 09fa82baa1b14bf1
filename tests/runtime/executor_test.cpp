#include "gpipe/runtime/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gpipe/schedule/generators.h"
#include "tests/runtime/runs.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::action;
using testing::chain;
using ::testing::ElementsAre;
using testing::every_kind;
using testing::expect_reference;
using testing::expect_runs;
using testing::expect_success;
using testing::FakeCells;
using testing::gpipe_program;
using ::testing::HasSubstr;
using testing::layout_of;
using testing::message;
using testing::straight;
using testing::with_skips;

TEST(Executor, RunsGPipeWithEveryCheckpointMode) {
  for (int stages = 1; stages <= 4; ++stages) {
    Executor executor(stages);
    for (int m = 1; m <= 5; ++m) {
      for (const auto mode : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
        expect_runs(executor, gpipe_program(stages, m, mode), stages * 10 + m);
      }
    }
  }
}

TEST(Executor, RunsSeveralStagesPerWorker) {
  Executor executor(2);
  for (const auto& placement : {std::vector{0, 1, 0, 1}, {0, 1, 1, 0}, {1, 1, 0, 0}}) {
    const auto layout = layout_of(placement, 4);
    const auto edges = with_skips(chain(4, 4), {{0, 3}, {0, 2}}, 4);
    expect_runs(executor, testing::make(layout, edges, fill_drain(layout, Checkpoint::kExceptLast)), 3);
  }
}

TEST(Executor, RunsSchedulesThatMixForwardsAndBackwardsWithSkips) {
  Executor executor(4);
  for (int m = 1; m <= 9; ++m) {
    const auto edges = with_skips(chain(4, 4), {{0, 3}, {1, 3}, {0, 2}}, 4);
    for (const auto& schedule : {testing::one_forward_one_backward(4, m), testing::zero_bubble(4, m)}) {
      expect_runs(executor, testing::make(straight(4, m), edges, schedule), m);
    }
  }
  Executor three(3);
  expect_runs(three, every_kind(), 1);
}

TEST(Executor, RunsEveryProgramThatTheVerifierAccepts) {
  std::mt19937 random(5);
  std::vector<std::unique_ptr<Executor>> executors;
  for (int workers = 1; workers <= 5; ++workers) executors.push_back(std::make_unique<Executor>(workers));
  int accepted = 0;
  for (unsigned i = 0; i < 600; ++i) {
    auto parts = testing::random_parts(random);
    if (!testing::refusal(parts.layout, parts.edges, parts.schedule).empty()) continue;
    const auto program = Program::make(parts.layout, parts.edges, parts.schedule);
    ++accepted;
    expect_runs(*executors[program.workers() - 1], program, i % 3 == 0 ? i + 1 : 0);
  }
  EXPECT_GT(accepted, 100);
}

TEST(Executor, EachWorkerKeepsItsThread) {
  const auto program = gpipe_program(3, 2);
  Executor executor(3);
  FakeCells cells(program);
  for (int i = 0; i < 5; ++i) expect_success(executor.run(program, Part::kAll, cells));
  std::set<std::thread::id> distinct = {std::this_thread::get_id()};
  for (const auto& threads : cells.threads) {
    EXPECT_EQ(threads, std::vector(5, threads.front()));
    EXPECT_TRUE(distinct.insert(threads.front()).second);
  }
}

TEST(Executor, RunsForwardAndBackwardSeparately) {
  const auto layout = layout_of({0, 1, 0}, 4);
  const auto edges = with_skips(chain(3, 4), {{0, 2}}, 4);
  const auto program = testing::make(layout, edges, fill_drain(layout, Checkpoint::kExceptLast));
  Executor executor(2);
  FakeCells cells(program, 9);
  expect_success(executor.run(program, Part::kForward, cells));
  EXPECT_EQ(cells.ran, fill(layout));
  EXPECT_EQ(cells.weights, std::vector<FakeCells::Number>(3, 0));
  expect_success(executor.run(program, Part::kBackward, cells));
  EXPECT_EQ(cells.ran, program.schedule());
  expect_reference(program, cells);
}

TEST(Executor, RunsInference) {
  const auto layout = straight(3, 5);
  const auto program = testing::make(layout, chain(3, 1), fill(layout));
  Executor executor(3);
  FakeCells cells(program, 2);
  expect_success(executor.run(program, Part::kForward, cells));
  EXPECT_EQ(cells.ran, program.schedule());
  expect_success(executor.run(program, Part::kBackward, cells));
  EXPECT_EQ(cells.ran, program.schedule());
  expect_reference(program, cells);
}

TEST(Executor, RefusesPartsOfAProgramThatIsNotTwoPhase) {
  const auto program = testing::make(straight(2, 3), chain(2, 2), testing::one_forward_one_backward(2, 3));
  Executor executor(2);
  FakeCells cells(program);
  EXPECT_THROW(executor.run(program, Part::kForward, cells), std::logic_error);
  EXPECT_THROW(executor.run(program, Part::kBackward, cells), std::logic_error);
  expect_success(executor.run(program, Part::kAll, cells));
}

TEST(Executor, RefusesAProgramWithAnotherNumberOfWorkers) {
  const auto program = gpipe_program(2, 2);
  FakeCells cells(program);
  for (const int workers : {1, 3}) {
    Executor executor(workers);
    EXPECT_THROW(executor.run(program, Part::kAll, cells), std::logic_error);
  }
  EXPECT_THAT(cells.threads, ElementsAre(ElementsAre(), ElementsAre()));
}

TEST(Executor, NeedsAtLeastOneWorker) {
  EXPECT_THROW(Executor(0), std::invalid_argument);
  EXPECT_THROW(Executor(-1), std::invalid_argument);
}

TEST(Executor, RefusesToRunOnItsOwnWorkers) {
  const auto program = gpipe_program(2, 2);
  Executor executor(2);
  Executor other(2);
  FakeCells cells(program);
  EXPECT_FALSE(executor.on_worker());
  cells.on_action = [&](const Action& it) {
    EXPECT_TRUE(executor.on_worker());
    EXPECT_FALSE(other.on_worker());
    expect_runs(other, program, 0);
    if (it == action("1F0")) executor.run(program, Part::kAll, cells);
  };
  const auto failure = executor.run(program, Part::kAll, cells);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->action, action("1F0"));
  EXPECT_THROW(std::rethrow_exception(failure->error), std::logic_error);
  EXPECT_THAT(message(*failure), HasSubstr("own workers"));
}

TEST(Executor, RunsRepeatedly) {
  const auto program = every_kind();
  Executor executor(3);
  for (unsigned i = 0; i < 300; ++i) expect_runs(executor, program, i % 2);
}

TEST(Executor, TwoExecutorsRunConcurrently) {
  const auto program = every_kind();
  const auto serve = [&](unsigned seed) {
    Executor executor(3);
    for (unsigned i = 0; i < 30; ++i) expect_runs(executor, program, seed + i);
  };
  std::thread one([&] { serve(1); });
  std::thread two([&] { serve(100); });
  one.join();
  two.join();
}

TEST(Executor, ConcurrentCallersTakeTurns) {
  const auto program = every_kind();
  const auto other = gpipe_program(3, 5);
  Executor executor(3);
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (unsigned i = 0; i < 20; ++i) expect_runs(executor, caller % 2 == 0 ? program : other, caller + i);
    });
  }
  for (auto& caller : callers) caller.join();
}

TEST(Executor, CanBeDestroyedWithoutARun) {
  for (int i = 0; i < 50; ++i) Executor executor(1 + i % 4);
}

TEST(Executor, RefusesToRunInAForkedProcess) {
  const auto program = gpipe_program(2, 2);
  auto executor = std::make_unique<Executor>(2);
  FakeCells cells(program);
  expect_success(executor->run(program, Part::kAll, cells));
  const auto child = fork();
  if (child == 0) {
    int code = executor->forked() ? 1 : 2;
    try {
      executor->run(program, Part::kAll, cells);
    } catch (const std::logic_error& error) {
      if (std::string(error.what()).find("forked") != std::string::npos) code = 0;
    }
    executor.reset();  // must not join threads
    _exit(code);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace gpipe
