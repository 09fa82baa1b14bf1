#include "gpipe/runtime/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpipe/schedule/generators.h"
#include "tests/runtime/runs.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::action;
using testing::every_kind;
using testing::expect_reference;
using testing::expect_success;
using testing::FakeCells;
using testing::Fault;
using testing::gpipe_program;

TEST(ExecutorTrace, HasEveryActionOnceInOrder) {
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

TEST(ExecutorTrace, OfAFailedRunHasTheActionsThatEnded) {
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

TEST(ExecutorTrace, RecomputeDoesNotWaitForItsGradient) {
  const auto program = gpipe_program(2, 2, Checkpoint::kAlways);
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
