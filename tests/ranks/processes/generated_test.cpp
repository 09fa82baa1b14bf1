// Generated cases over ranks and replicas.

#include "tests/gpipe/generated_case.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

/// So that all ranks can compare outputs.
JobOptions sharing(seconds limit, int replicas = 1) {
  return {.ranks = patient().share_outputs(true).replicas(replicas), .limit = limit};
}

/// The seeds to begin with, and the number of cases for each number of ranks.
Seeds cases() { return seeds_from_environment(32); }

/// Runs generated cases that have enough workers and samples. All ranks generate the same.
void run_cases(const std::shared_ptr<Ranks>& ranks) {
  const auto seeds = cases();
  std::uint64_t run = 0;
  for (std::uint64_t seed = seeds.first; run < seeds.count; ++seed) {
    const auto spec = generate(seed, /*portable=*/seed % 2 == 1);
    const auto& [positions, replicas] = ranks->mesh();
    if (spec.workers < positions || spec.batch < replicas || spec.may_be_refused()) continue;
    if (replicas > 1 && spec.has(Unit::kAlone)) continue;
    ++run;
    const auto outcome = compare(spec, std::nullopt, ranks);
    if (outcome.verdict != Outcome::kDifferent) continue;
    ADD_FAILURE() << outcome.what << "\n  " << to_string(spec);
    break;  // the other ranks may wait
  }
}

// Pipelines over processes equal the reference bit by bit.
RANKS_TEST(RanksTransparency, TwoRanks, 2, sharing(seconds(60 + cases().count))) { run_cases(ranks); }
RANKS_TEST(RanksTransparency, FourRanks, 4, sharing(seconds(60 + cases().count))) { run_cases(ranks); }
RANKS_TEST(RanksTransparency, TwoReplicas, 4, sharing(seconds(60 + cases().count), 2)) { run_cases(ranks); }
RANKS_TEST(RanksTransparency, ThreeReplicas, 3, sharing(seconds(60 + cases().count), 3)) { run_cases(ranks); }

}  // namespace
}  // namespace gpipe
