// Generated programs of all named schedules on the real executor, with random delays and errors.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gpipe/runtime/executor.h"
#include "gpipe/schedules.h"
#include "tests/runtime/fake_cells.h"
#include "tests/runtime/generated_programs.h"

namespace gpipe {
namespace {

using testing::dally;
using testing::describe;
using testing::expect_reference;
using testing::expect_success;
using testing::FakeCells;
using testing::Fault;
using testing::generate;

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
  const auto seeds = seeds_from_environment(250);
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
  }
  print(seeds, counts);
  if (seeds.count < 250) return;
  for (const auto& rule : schedule_rules()) EXPECT_GT(counts[std::string(rule.name)], 0) << rule.name;
}

}  // namespace
}  // namespace gpipe
