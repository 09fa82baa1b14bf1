// Pipelines over processes equal the reference bit by bit.

#include <gtest/gtest.h>

#include "tests/gpipe/generated_case.h"
#include "tests/gpipe/random_cases.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

/// Seeds to begin with, and the number of cases for each number of ranks.
Seeds cases() { return seeds_from_environment(80); }

/// Runs generated cases that have enough workers. All ranks generate the same.
void run_cases(const std::shared_ptr<Ranks>& ranks) {
  const auto seeds = cases();
  Counts seen;
  std::uint64_t run = 0;
  for (std::uint64_t seed = seeds.first; run < seeds.count; ++seed) {
    const auto spec = generate(seed, /*portable=*/true);
    if (spec.workers < ranks->size()) continue;
    ++run;
    for (const auto& feature : features(spec)) ++seen[feature];
    const auto outcome = compare(spec, std::nullopt, ranks);
    if (outcome.verdict != Outcome::kDifferent) continue;
    ADD_FAILURE() << outcome.what << "\n  " << to_string(spec);
    break;  // the other ranks may wait
  }
  print(std::to_string(run) + " cases from seed " + std::to_string(seeds.first), seen);
}

void expect_transparency(int ranks) {
  expect_job(ranks, run_cases, {.limit = std::chrono::seconds(60 + cases().count)});
}

TEST(RanksTransparency, TwoRanks) { expect_transparency(2); }
TEST(RanksTransparency, ThreeRanks) { expect_transparency(3); }
TEST(RanksTransparency, FourRanks) { expect_transparency(4); }

}  // namespace
}  // namespace gpipe
