// Generated programs of all named schedules on the real executor, with random delays and errors.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpipe/runtime/executor.h"
#include "gpipe/schedule/capacity.h"
#include "gpipe/schedule/schedules.h"
#include "tests/gpipe/random_cases.h"
#include "tests/runtime/runs.h"
#include "tests/schedule/shapes.h"

namespace gpipe {
namespace {

using testing::expect_reference;
using testing::expect_success;
using testing::FakeCells;
using testing::Fault;

constexpr int kMostWorkers = 6;

/// What a seed stands for.
struct GeneratedProgram {
  std::string schedule;
  Checkpoint checkpoint = Checkpoint::kNever;
  Program program;
  bool scarce = false;  ///< whether some edge has less than its sufficient capacity
};

template <typename T>
void shuffle(std::mt19937_64& random, std::vector<T>& values) {
  for (std::size_t i = 1; i < values.size(); ++i) std::swap(values[i], values[draw(random, 0, static_cast<int>(i))]);
}

/// Draws a layout that fits the rule: looped, a V, or any placement.
Layout draw_layout(std::mt19937_64& random, const ScheduleRule& rule) {
  for (;;) {
    const int workers = draw(random, 1, kMostWorkers);
    const int micro_batches = draw(random, 1, 3 * workers);
    Layout layout = draw(random, 0, 2) == 0 ? testing::v_shaped(workers, micro_batches)
                                            : testing::looped(workers, draw(random, 1, 3), micro_batches);
    if (draw(random, 0, 3) == 0) shuffle(random, layout.placement);
    if (rule.misfit(layout).empty()) return layout;
  }
}

/// Activations and random skips, in random order. Some have less than their sufficient capacity, if the schedule still
/// runs.
Program draw_program(std::mt19937_64& random, const Layout& layout, const Schedule& schedule, bool& scarce) {
  std::vector<std::pair<int, int>> skips;
  for (int left = draw(random, 0, 4); left > 0 && layout.stages > 1; --left) {
    const int from = draw(random, 0, layout.stages - 2);
    skips.emplace_back(from, draw(random, from + 1, layout.stages - 1));
  }
  auto edges = testing::with_skips(testing::chain(layout.stages, 1), skips, 1);
  shuffle(random, edges);
  edges = testing::with_sufficient_capacities(std::move(edges), layout, schedule);
  if (draw(random, 0, 1) == 0) {
    auto fewer = edges;
    for (auto& edge : fewer) edge.capacity = draw(random, 1, edge.capacity);
    auto program = Program::make(layout, std::move(fewer), schedule);
    scarce = program.ok();
    if (scarce) return *std::move(program);
  }
  return testing::make(layout, std::move(edges), schedule);
}

GeneratedProgram generate(std::mt19937_64& random) {
  const auto rules = schedule_rules();
  const auto& rule = rules[draw(random, 0, static_cast<int>(rules.size()) - 1)];
  const auto checkpoint = static_cast<Checkpoint>(draw(random, 0, 2));
  const auto layout = draw_layout(random, rule);
  bool scarce = false;
  auto program = draw_program(random, layout, make_schedule(rule.name, layout, checkpoint), scarce);
  return {std::string(rule.name), checkpoint, std::move(program), scarce};
}

std::string describe(const GeneratedProgram& generated) {
  const auto& layout = generated.program.layout();
  std::string text = generated.schedule + ", " + to_string(generated.checkpoint) + ", " +
                     std::to_string(layout.micro_batches) + " micro-batches, workers of the stages:";
  for (const int worker : layout.placement) text += " " + std::to_string(worker);
  for (const auto& edge : generated.program.edges()) {
    text += ", " + edge.name + " (" + std::to_string(edge.capacity) + ")";
  }
  return text;
}

/// Takes up to 50 µs, mostly nothing. Depends on the arguments only, so that threads share nothing.
void dally(std::uint64_t seed, const Action& action) {
  std::seed_seq sequence{static_cast<int>(seed), static_cast<int>(action.kind), action.stage, action.micro_batch};
  std::uint32_t number = 0;
  sequence.generate(&number, &number + 1);
  const auto choice = number % 16;
  const auto amount = number / 16 % 64;
  if (choice == 0) std::this_thread::sleep_for(std::chrono::microseconds(amount % 50));
  if (choice >= 1 && choice <= 3) {
    for (std::uint32_t i = 0; i < amount % 4; ++i) std::this_thread::yield();
  }
  if (choice >= 4 && choice <= 7) {
    for (volatile std::uint32_t i = 0; i < 32 * amount;) i = i + 1;
  }
}

/// One executor per number of workers. Every run follows runs that succeeded and runs that failed.
class Executors {
 public:
  Executor& of(const Program& program) {
    auto& executor = executors_[program.workers()];
    if (!executor) executor = std::make_unique<Executor>(program.workers());
    return *executor;
  }

 private:
  std::map<int, std::unique_ptr<Executor>> executors_;
};

void expect_correct(Executor& executor, const Program& program, std::uint64_t seed) {
  FakeCells cells(program);
  cells.on_action = [seed](const Action& action) { dally(seed, action); };
  if (program.two_phase() && seed % 2 == 0) {
    expect_success(executor.run(program, Part::kForward, cells));
    expect_success(executor.run(program, Part::kBackward, cells));
  } else {
    expect_success(executor.run(program, Part::kAll, cells));
  }
  EXPECT_EQ(cells.ran, program.schedule());
  expect_reference(program, cells);
}

/// Lets one or two actions throw.
void expect_failure(Executor& executor, const Program& program, std::mt19937_64& random) {
  std::vector<Action> faulty;
  for (int left = draw(random, 1, 2); left > 0; --left) {
    const auto& list = program.schedule()[draw(random, 0, program.workers() - 1)];
    faulty.push_back(list[draw(random, 0, static_cast<int>(list.size()) - 1)]);
  }
  const auto throws = [&faulty](const Action& action) {
    return std::find(faulty.begin(), faulty.end(), action) != faulty.end();
  };
  FakeCells cells(program);
  cells.on_action = [&, seed = random()](const Action& action) {
    dally(seed, action);
    if (throws(action)) throw Fault{action};
  };
  const auto failure = executor.run(program, Part::kAll, cells);
  ASSERT_TRUE(failure);
  ASSERT_TRUE(failure->action);
  EXPECT_TRUE(throws(*failure->action)) << to_string(*failure->action);
  try {
    std::rethrow_exception(failure->error);
  } catch (const Fault& fault) {
    EXPECT_EQ(fault.action, failure->action);
  }
  for (int w = 0; w < program.workers(); ++w) {
    const auto& list = program.schedule()[w];
    const auto& ran = cells.ran[w];
    ASSERT_LE(ran.size(), list.size());
    EXPECT_TRUE(std::equal(ran.begin(), ran.end(), list.begin()));
    const auto thrown = std::find_if(ran.begin(), ran.end(), throws);
    EXPECT_TRUE(thrown == ran.end() || thrown + 1 == ran.end()) << "worker " << w << " ran on after its error";
  }
}

TEST(GeneratedPrograms, RunFailAndRunAgain) {
  const auto seeds = seeds_from_environment(500);
  Counts counts;
  Executors executors;
  for (auto seed = seeds.first; seed < seeds.first + seeds.count && !HasFailure(); ++seed) {
    std::mt19937_64 random(seed);
    const auto generated = generate(random);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + describe(generated));
    auto& executor = executors.of(generated.program);
    expect_correct(executor, generated.program, random());
    expect_failure(executor, generated.program, random);
    if (draw(random, 0, 3) == 0) expect_correct(executor, generated.program, random());
    ++counts[generated.schedule];
    ++counts[to_string(generated.checkpoint)];
    if (generated.scarce) ++counts["scarce edges"];
  }
  print(seeds, counts);
  if (seeds.count < 500) return;
  for (const auto& rule : schedule_rules()) EXPECT_GT(counts[std::string(rule.name)], 0) << rule.name;
  EXPECT_GT(counts["scarce edges"], 0);
}

}  // namespace
}  // namespace gpipe
