// Steps of many sizes and scales leave nothing behind.

#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <cstddef>
#include <filesystem>
#include <iterator>

#include "tests/gpipe/helpers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

/// What a process has in use.
struct Used {
  std::size_t bytes = mallinfo2().uordblks;  // 0 with sanitizers
  std::ptrdiff_t threads = entries("/proc/self/task");
  std::ptrdiff_t descriptors = entries("/proc/self/fd");

  static std::ptrdiff_t entries(const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder), {});
  }
};

TEST(RanksManySteps, LeaveNothingBehind) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    GPipe pipe(Sequential(Linear(4, 4), Linear(4, 4)), Balance{1, 1}, GPipeOptions().chunks(2).ranks(ranks));
    int step = 0;
    const auto step_some = [&] {
      for (int i = 0; i < 300; ++i, ++step) {
        const auto x = torch::ones({1 + step * 7 % 50, 4});
        pipe->step(x, x, tensor_loss([](const Tensor& out, const Tensor& t) { return torch::mse_loss(out, t); }),
                   StepOptions().scale(1 + step / 1e4));
      }
      return Used();
    };
    step_some();
    const auto before = step_some();
    const auto after = step_some();
    EXPECT_LT(after.bytes, before.bytes + 200'000);
    EXPECT_LE(after.threads, before.threads);
    EXPECT_LE(after.descriptors, before.descriptors);
  });
}

}  // namespace
}  // namespace gpipe
