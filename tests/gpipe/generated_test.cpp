//   GPIPE_GENERATED_CASES=50000 GPIPE_GENERATED_SEED=7 gpipe_tests --gtest_filter='Generated*'
#include "tests/gpipe/generated_case.h"

namespace gpipe {
namespace {

TEST(Generated, PipelinesTrainAsTheReferenceBitByBitAndAsTheWholeModel) {
  const auto seeds = seeds_from_environment(300);
  std::set<std::string> seen;
  std::uint64_t verdicts[4] = {};
  expect_no_fault(seeds, /*portable=*/false, [&](const Spec& spec) {
    const auto outcome = compare(spec);
    ++verdicts[outcome.verdict];
    if (outcome.verdict == Outcome::kNoModel) return std::string();
    for (const auto& feature : features(spec)) seen.insert(feature);
    return outcome.verdict == Outcome::kDifferent ? outcome.what : "";
  });
  EXPECT_LE(verdicts[Outcome::kNoModel] * 3, seeds.count) << "models that PyTorch refuses";
  EXPECT_LE(verdicts[Outcome::kRefused] * 8, seeds.count) << "models that pipelines refuse";
  if (seeds.count >= 300) EXPECT_EQ(seen.size(), kFeatures) << "a feature never occurred";
}

}  // namespace
}  // namespace gpipe
