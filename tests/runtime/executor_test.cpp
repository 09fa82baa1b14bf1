#include "gpipe/runtime/executor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gpipe/schedule/generators.h"
#include "tests/runtime/fake_cells.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::action;
using testing::chain;
using ::testing::ElementsAre;
using testing::FakeCells;
using ::testing::HasSubstr;
using testing::layout_of;
using testing::lists;
using testing::straight;
using testing::with_skips;

/// An error of a type that only the test knows.
struct Fault {
  Action action;
};

/// A program in which every kind of action occurs, with a skip over the middle stage.
Program every_kind() {
  return testing::make(
      straight(3, 4), with_skips(chain(3, 2), {{0, 2}}, 3),
      lists({"0F0 0F1 0F2 0R0 0B0 0F3 0R1 0I1 0W1 0I2 0B3 0W2", "1F0 1F1 1R0 1B0 1F2 1I1 1F3 1R2 1B2 1W1 1B3",
             "2F0 2I0 2F1 2W0 2R1 2B1 2F2 2B2 2F3 2I3 2W3"}));
}

Program gpipe_program(int stages, int micro_batches, Checkpoint checkpoint = Checkpoint::kExceptLast) {
  const auto layout = straight(stages, micro_batches);
  return testing::make(layout, chain(stages, 1), fill_drain(layout, checkpoint));
}

void expect_success(const std::optional<Failure>& failure) {
  if (!failure) return;
  try {
    std::rethrow_exception(failure->error);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "failed" << (failure->action ? " in " + to_string(*failure->action) : "") << ": " << error.what();
  }
}

void expect_reference(const Program& program, const FakeCells& cells) {
  const auto expected = testing::reference(program);
  EXPECT_EQ(cells.outputs, expected.outputs);
  EXPECT_EQ(cells.weights, expected.weights);
}

/// Runs all of the program with random delays and compares with the reference.
void expect_runs(Executor& executor, const Program& program, unsigned seed) {
  FakeCells cells(program, seed);
  expect_success(executor.run(program, Part::kAll, cells));
  EXPECT_EQ(cells.ran, program.schedule());
  expect_reference(program, cells);
}

std::string message(const Failure& failure) {
  try {
    std::rethrow_exception(failure.error);
  } catch (const std::exception& error) {
    return error.what();
  }
}

TEST(Executor, RunsGPipeInEveryMode) {
  for (int stages = 1; stages <= 4; ++stages) {
    Executor executor(stages);
    for (int m = 1; m <= 5; ++m) {
      for (const auto mode : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
        expect_runs(executor, gpipe_program(stages, m, mode), stages * 10 + m);
      }
    }
  }
}

TEST(Executor, RunsSeveralStagesAWorker) {
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
    const auto program = Program::make(parts.layout, parts.edges, parts.schedule);
    if (!program.ok()) continue;
    ++accepted;
    expect_runs(*executors[program->workers() - 1], *program, i % 3 == 0 ? i + 1 : 0);
  }
  EXPECT_GT(accepted, 100);
}

TEST(Executor, GivesEachWorkerOneThreadForLife) {
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

TEST(Executor, RunsForwardAndBackwardApart) {
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

TEST(Executor, RefusesPartsOfAProgramThatIsNotInTwoPhases) {
  const auto program = testing::make(straight(2, 3), chain(2, 2), testing::one_forward_one_backward(2, 3));
  Executor executor(2);
  FakeCells cells(program);
  EXPECT_THROW(executor.run(program, Part::kForward, cells), std::logic_error);
  EXPECT_THROW(executor.run(program, Part::kBackward, cells), std::logic_error);
  expect_success(executor.run(program, Part::kAll, cells));
}

TEST(Executor, RefusesAProgramForOtherWorkers) {
  const auto program = gpipe_program(2, 2);
  FakeCells cells(program);
  for (const int workers : {1, 3}) {
    Executor executor(workers);
    EXPECT_THROW(executor.run(program, Part::kAll, cells), std::logic_error);
  }
  EXPECT_THAT(cells.threads, ElementsAre(ElementsAre(), ElementsAre()));
}

TEST(Executor, RefusesToHaveNoWorkers) {
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

TEST(Failure, OfAnyActionIsReportedAndTheExecutorWorksOn) {
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

TEST(Failure, StopsWhatDependsOnIt) {
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
  EXPECT_LE(cells.ran[0].size(), 5);  // 0F3 on the edge, 0F4 waiting for room
}

TEST(Failure, StopsWorkersThatExchangeNothing) {
  const auto program = testing::make(straight(2, 3), {}, fill(straight(2, 3)));
  Executor executor(2);
  FakeCells cells(program);
  // 1F0 fails while 0F1 runs, which ends when the failure is known.
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

TEST(Failure, ReleasesProducersThatWaitForRoom) {
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

TEST(Failure, OfTheSetUpHasNoAction) {
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

TEST(Failure, KeepsTheFirst) {
  const auto program = gpipe_program(3, 4);
  Executor executor(3);
  FakeCells cells(program, 8);
  cells.on_action = [](const Action& it) {
    if (it == action("2B1")) throw Fault{it};
  };
  // Workers 0 and 1 wait for gradients that 2B1 would have sent, so they get here only after its failure.
  cells.after = [](int worker) { throw std::runtime_error("late, on worker " + std::to_string(worker)); };
  const auto failure = executor.run(program, Part::kAll, cells);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->action, action("2B1"));
  EXPECT_THROW(std::rethrow_exception(failure->error), Fault);
}

TEST(Failure, KeepsOneOfManyAtOnce) {
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

/// Calls run_actions() so many times on worker 1.
struct Restless : FakeCells {
  Restless(const Program& program, int walks) : FakeCells(program), walks_(walks) {}
  void work(int worker, absl::FunctionRef<void()> run_actions) override {
    for (int i = 0; i < (worker == 1 ? walks_ : 1); ++i) run_actions();
  }
  const int walks_;
};

TEST(Failure, IsASetUpThatDoesNotWalkOnce) {
  const auto program = gpipe_program(3, 4);
  Executor executor(3);
  for (const int walks : {0, 2}) {
    Restless cells(program, walks);
    const auto failure = executor.run(program, Part::kAll, cells);
    ASSERT_TRUE(failure);
    EXPECT_FALSE(failure->action);
    EXPECT_THAT(message(*failure), HasSubstr("run_actions() " + std::to_string(walks) + " times for worker 1"));
  }
}

TEST(Executor, RunsManyTimes) {
  const auto program = every_kind();
  Executor executor(3);
  for (unsigned i = 0; i < 300; ++i) expect_runs(executor, program, i % 2);
}

TEST(Executor, RunsBesideAnother) {
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

TEST(Executor, TakesTurnsBetweenCallers) {
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

TEST(Executor, ComesAndGoes) {
  for (int i = 0; i < 50; ++i) Executor executor(1 + i % 4);
}

TEST(Trace, HoldsEveryActionOnceInOrder) {
  const auto program = every_kind();
  Executor executor(3);
  Timeline timeline;
  for (const int step : {0, 1}) {
    FakeCells cells(program, 3);
    expect_success(executor.run(program, Part::kAll, cells, &timeline, step));
  }
  EXPECT_EQ(timeline.workers, 3);
  EXPECT_EQ(timeline.edges.size(), program.edges().size());
  for (int w = 0; w < 3; ++w) {
    double clock = 0;
    std::vector<Action> expected;
    std::vector<Action> ran;
    for (const int step : {0, 1}) {
      expected.insert(expected.end(), program.schedule()[w].begin(), program.schedule()[w].end());
      for (const Span& span : timeline.spans) {
        if (span.worker != w || span.step != step) continue;
        EXPECT_GE(span.start, clock);
        EXPECT_GE(span.end, span.start);
        clock = span.end;
        ran.push_back(span.action);
      }
    }
    EXPECT_EQ(ran, expected);
  }
}

TEST(Trace, OfAFailureHoldsWhatEnded) {
  const auto program = gpipe_program(1, 3, Checkpoint::kAlways);
  Executor executor(1);
  FakeCells cells(program);
  cells.on_action = [](const Action& it) {
    if (it == action("0B2")) throw Fault{it};
  };
  Timeline timeline;
  ASSERT_TRUE(executor.run(program, Part::kAll, cells, &timeline, 7));
  std::string ran;
  for (const Span& span : timeline.spans) ran += to_string(span.action) + " ";
  EXPECT_EQ(ran, "0F0 0F1 0F2 0R2 ");
  EXPECT_EQ(timeline.spans.front().step, 7);
}

TEST(Executor, PollsWhileItWaitsAndEndsWithWhatThePollThrows) {
  const auto program = gpipe_program(2, 4);
  std::atomic<int> polls = 0;
  std::set<std::thread::id> threads;
  Executor executor(2, [&] {
    threads.insert(std::this_thread::get_id());
    if (++polls == 2) throw Fault{};
  });
  FakeCells cells(program);
  cells.on_action = [&](const Action& it) {
    if (it != action("0F1")) return;
    while (polls < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until what the second poll throws has been noted
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
    executor.reset();  // joins nobody
    _exit(code);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Trace, ShowsARecomputeThatDoesNotWaitForItsGradient) {
  const auto program = gpipe_program(2, 2, Checkpoint::kAlways);
  Executor executor(2);
  FakeCells cells(program);
  // 1B1, which sends the gradient, does not begin before 0R1 has: an R that waited for it would never begin.
  std::promise<void> recomputing;
  cells.on_action = [&](const Action& it) {
    if (it == action("0R1")) recomputing.set_value();
    if (it != action("1B1")) return;
    if (recomputing.get_future().wait_for(std::chrono::minutes(1)) != std::future_status::ready) {
      throw std::runtime_error("0R1 waits for the gradient");
    }
  };
  Timeline timeline;
  expect_success(executor.run(program, Part::kAll, cells, &timeline));
  const auto span = [&](const char* text) {
    return *std::find_if(timeline.spans.begin(), timeline.spans.end(),
                         [&](const Span& it) { return it.action == action(text); });
  };
  EXPECT_LT(span("0R1").start, span("1B1").end);
  EXPECT_LT(span("1B1").end, span("0B1").start);
  expect_reference(program, cells);
}

}  // namespace
}  // namespace gpipe
