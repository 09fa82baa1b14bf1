// What a pipeline keeps between mini-batches.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "gpipe/schedule/program.h"
#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

// With split_size, mini-batches of many sizes need many programs.
TEST(Pipeline, KeepsTheSixteenProgramsUsedLast) {
  using torch::nn::Identity;
  GPipe pipe(Sequential(Identity(), Identity()), {1, 1});
  const std::weak_ptr<const Program> oldest = pipe->program(1);
  const std::weak_ptr<const Program> often = pipe->program(2);
  std::vector<std::weak_ptr<const Program>> others;
  for (int micro_batches = 3; micro_batches < 40; ++micro_batches) {
    others.push_back(pipe->program(micro_batches));
    EXPECT_EQ(pipe->program(2), often.lock());
  }
  EXPECT_TRUE(oldest.expired());
  EXPECT_EQ(std::count_if(others.begin(), others.end(), [](const auto& each) { return !each.expired(); }), 15);
  EXPECT_EQ(pipe->program(39), others.back().lock());
  EXPECT_EQ(pipe->program(1)->layout().micro_batches, 1);
}

}  // namespace
}  // namespace gpipe
