//   GPIPE_GENERATED_CASES=50000 GPIPE_GENERATED_SEED=7 gpipe_tests --gtest_filter='Generated*'
#include <gtest/gtest.h>

#include "absl/cleanup/cleanup.h"
#include "tests/gpipe/generated_case.h"
#include "tests/gpipe/random_cases.h"

namespace gpipe {
namespace {

TEST(Generated, PipelinesEqualTheReferenceBitByBit) {
  const auto seeds = seeds_from_environment(3000);
  const absl::Cleanup put_back = [before = torch::get_num_threads()] { torch::set_num_threads(before); };
  torch::set_num_threads(1);
  const auto differs = [](const Spec& spec) { return !difference(spec).empty(); };
  Counts seen;
  int failures = 0;
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count && failures < 3; ++seed) {
    const auto spec = generate(seed);
    for (const auto& feature : features(spec)) ++seen[feature];
    if (!differs(spec)) continue;
    ++failures;
    const auto small = shrink(spec, smaller, differs);
    ADD_FAILURE() << difference(small) << "\n  " << to_string(small) << "\n  shrunk from " << to_string(spec);
  }
  print(seeds, seen);
  if (seeds.count >= 3000) EXPECT_EQ(seen.size(), kFeatures) << "a feature never occurred";
}

}  // namespace
}  // namespace gpipe
