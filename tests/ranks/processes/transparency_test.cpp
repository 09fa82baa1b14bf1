// Pipelines over processes equal the reference bit by bit.

#include <gtest/gtest.h>

#include "tests/gpipe/generated_case.h"
#include "tests/gpipe/random_cases.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

/// Runs generated cases that have enough workers. All ranks generate the same.
void run_cases(const std::shared_ptr<Ranks>& ranks) {
  const auto seeds = seeds_from_environment(80);
  Counts seen;
  std::uint64_t run = 0;
  for (std::uint64_t seed = seeds.first; run < seeds.count; ++seed) {
    const auto spec = generate(seed);
    if (workers_of(spec) < ranks->size()) continue;
    ++run;
    for (const auto& feature : features(spec)) ++seen[feature];
    const auto result = difference(spec, std::nullopt, ranks);
    if (result.empty()) continue;
    ADD_FAILURE() << result << "\n  " << to_string(spec);
    break;  // the other ranks may wait
  }
  print(std::to_string(run) + " cases from seed " + std::to_string(seeds.first), seen);
}

TEST(RanksTransparency, TwoRanks) { expect_job(2, run_cases); }
TEST(RanksTransparency, ThreeRanks) { expect_job(3, run_cases); }
TEST(RanksTransparency, FourRanks) { expect_job(4, run_cases); }

}  // namespace
}  // namespace gpipe
