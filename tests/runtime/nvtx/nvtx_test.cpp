#include <gmock/gmock.h>
#include <torch/torch.h>

#include "gpipe/gpipe.h"

namespace gpipe {

namespace nvtx {
std::vector<std::string> ended_ranges();  // of listener.cpp
}

namespace {

TEST(Nvtx, AStepShowsActionsAndLayers) {
  const torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kNever));
  const auto x = torch::ones({2, 2});
  pipe->step(x, x, tensor_loss([](const auto& output, const auto& target) { return (output - target).mean(); }));
  EXPECT_THAT(
      nvtx::ended_ranges(),
      ::testing::IsSupersetOf({"gpipe: gpipe 0F0", "gpipe: gpipe 0F0 > gpipe: gpipe layer 0",
                               "gpipe: gpipe 1F1 > gpipe: gpipe layer loss", "gpipe: gpipe 1B1", "gpipe: gpipe 0B0"}));
}

}  // namespace
}  // namespace gpipe
