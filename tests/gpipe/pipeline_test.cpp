// What a pipeline keeps from one mini-batch to the next.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe {
namespace {

using torch::nn::Identity;
using torch::nn::Sequential;

// As when each mini-batch has another size, and split_size makes another number of micro-batches of each.
TEST(PipelineTest, KeepsTheProgramsThatWereLastAskedFor) {
  GPipe pipe(Sequential(Identity(), Identity()), {1, 1});
  const std::weak_ptr<const Program> forgotten = pipe->program(1);
  const std::weak_ptr<const Program> often = pipe->program(2);
  std::vector<std::weak_ptr<const Program>> others;
  for (int micro_batches = 3; micro_batches < 40; ++micro_batches) {
    others.push_back(pipe->program(micro_batches));
    EXPECT_EQ(pipe->program(2), often.lock());
  }
  EXPECT_TRUE(forgotten.expired());
  EXPECT_EQ(std::count_if(others.begin(), others.end(), [](const auto& each) { return !each.expired(); }), 15);
  EXPECT_EQ(pipe->program(39), others.back().lock());
  EXPECT_EQ(pipe->program(1)->layout().micro_batches, 1);
}

}  // namespace
}  // namespace gpipe
