// Generated programs of all named schedules on the real executor, with random delays and errors.
#include "tests/runtime/generated_programs.h"

#include "tests/runtime/fake_cells.h"

namespace gpipe::testing {
namespace {

using ::testing::Field;
using ::testing::Throws;

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
  FakeCells cells(program, random());
  cells.on_action = [&](const Action& action) {
    if (throws(action)) throw Fault{action};
  };
  const auto failure = executor.run(program, Part::kAll, cells);
  ASSERT_TRUE(failure);
  ASSERT_TRUE(failure->action);
  EXPECT_TRUE(throws(*failure->action)) << to_string(*failure->action);
  EXPECT_THAT([&] { std::rethrow_exception(failure->error); }, Throws<Fault>(Field(&Fault::action, *failure->action)));
  for (int w = 0; w < program.workers(); ++w) {
    const auto& list = program.schedule()[w];
    const auto& ran = cells.ran[w];
    EXPECT_TRUE(std::mismatch(ran.begin(), ran.end(), list.begin(), list.end()).first == ran.end());
    const auto thrown = std::find_if(ran.begin(), ran.end(), throws);
    EXPECT_TRUE(thrown == ran.end() || thrown + 1 == ran.end()) << "worker " << w << " ran on after its error";
  }
}

TEST(GeneratedPrograms, RunFailAndRunAgain) {
  const auto seeds = seeds_from_environment(250);
  std::set<std::string_view> seen;
  std::map<int, std::unique_ptr<Executor>> executors;  // by workers; each runs programs that succeed and that fail
  for (auto seed = seeds.first; seed < seeds.first + seeds.count && !HasFailure(); ++seed) {
    std::mt19937_64 random(seed);
    const auto generated = generate(random);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + describe(generated));
    const auto& program = generated.program;
    auto& executor = executors[program.workers()];
    if (!executor) executor = std::make_unique<Executor>(program.workers());
    expect_runs(*executor, program, random());
    expect_failure(*executor, program, random);
    if (draw(random, 0, 3) == 0) expect_runs(*executor, program, random());
    seen.insert(schedule_rule(generated.schedule).name);
  }
  if (seeds.count >= 250) EXPECT_EQ(seen.size(), schedule_rules().size()) << "a schedule never occurred";
}

}  // namespace
}  // namespace gpipe::testing
