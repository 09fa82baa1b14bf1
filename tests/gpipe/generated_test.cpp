//   GPIPE_GENERATED_CASES=50000 GPIPE_GENERATED_SEED=7 gpipe_tests --gtest_filter='Generated*'
#include "tests/gpipe/generated_case.h"
#include "tests/gpipe/random_cases.h"

namespace gpipe {
namespace {

TEST(Generated, PipelinesTrainAsTheReferenceBitByBitAndAsTheWholeModel) {
  const auto seeds = seeds_from_environment(300);
  const absl::Cleanup put_back = [before = torch::get_num_threads()] { torch::set_num_threads(before); };
  torch::set_num_threads(1);
  const auto differs = [](const Spec& spec) { return compare(spec).verdict == Outcome::kDifferent; };
  Counts seen;
  std::uint64_t verdicts[4] = {};
  int failures = 0;
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count && failures < 3; ++seed) {
    const auto spec = generate(seed, /*portable=*/false);
    const auto verdict = compare(spec).verdict;
    ++verdicts[verdict];
    if (verdict == Outcome::kNoModel) continue;
    for (const auto& feature : features(spec)) ++seen[feature];
    if (verdict != Outcome::kDifferent) continue;
    ++failures;
    const auto small = shrink(spec, smaller, differs);
    ADD_FAILURE() << compare(small).what << "\n  " << to_string(small) << "\n  shrunk from " << to_string(spec);
  }
  print(seeds, seen);
  std::cout << verdicts[Outcome::kNoModel] << " models that PyTorch refuses, " << verdicts[Outcome::kRefused]
            << " that pipelines refuse" << std::endl;
  EXPECT_LE(verdicts[Outcome::kNoModel] * 3, seeds.count);
  EXPECT_LE(verdicts[Outcome::kRefused] * 8, seeds.count);
  if (seeds.count >= 300) EXPECT_EQ(seen.size(), kFeatures) << "a feature never occurred";
}

}  // namespace
}  // namespace gpipe
