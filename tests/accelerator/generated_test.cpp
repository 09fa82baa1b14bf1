// The random cases of transparency, on devices that check the order of streams:
//   GPIPE_GENERATED_CASES=50000 GPIPE_GENERATED_SEED=7 accelerator_tests --gtest_filter='GeneratedOnDevices*'
#include <gtest/gtest.h>

#include <random>

#include "absl/cleanup/cleanup.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/generated_case.h"
#include "tests/gpipe/random_cases.h"

namespace gpipe {
namespace {

using accelerator::device;
using accelerator::stream_order;

constexpr int kWorkers = 4;

/// Devices for a case: one to four, in a third of the cases also the CPU.
Devices draw_devices(std::uint64_t seed) {
  std::mt19937_64 random(seed + 3);
  const int devices = draw(random, 1, accelerator::kDevices);
  const int first = draw(random, 0, 2) == 0 ? -1 : 0;
  const auto any = [&]() -> torch::Device {
    const int index = draw(random, first, devices - 1);
    return index < 0 ? torch::Device(torch::kCPU) : device(index);
  };
  Devices drawn{{}, any(), any(), device(0)};
  for (int worker = 0; worker < kWorkers; ++worker) drawn.workers.push_back(any());
  return drawn;
}

/// What is wrong with a case: a violation, or a difference from the reference.
std::string fault(const Spec& spec) {
  stream_order().take_violations();
  auto outcome = compare(spec, draw_devices(spec.seed));
  const auto violations = stream_order().take_violations();
  if (!violations.empty()) return violations.front();
  return outcome.verdict == Outcome::kDifferent ? outcome.what : "";
}

TEST(GeneratedOnDevices, PipelinesComputeWhatTheReferenceDoes) {
  const auto seeds = seeds_from_environment(500);
  const absl::Cleanup put_back = [before = torch::get_num_threads()] { torch::set_num_threads(before); };
  torch::set_num_threads(1);
  const auto fails = [](const Spec& spec) { return !fault(spec).empty(); };
  int failures = 0;
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.count && failures < 3; ++seed) {
    const auto spec = generate(seed, /*portable=*/true);
    if (!fails(spec)) continue;
    ++failures;
    const auto small = shrink(spec, smaller, fails);
    ADD_FAILURE() << fault(small) << "\n  " << to_string(small) << "\n  shrunk from " << to_string(spec);
  }
}

}  // namespace
}  // namespace gpipe
