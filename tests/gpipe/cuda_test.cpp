// Pipelines on a GPU. Skipped on machines without one.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "models/unet.h"
#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no CUDA device";
  }

  /// All stages on the first GPU, or, mixed, every other stage on the CPU.
  static std::vector<torch::Device> devices(std::size_t stages, bool mixed) {
    std::vector<torch::Device> devices(stages, torch::Device(torch::kCUDA, 0));
    for (std::size_t s = 1; mixed && s < stages; s += 2) devices[s] = torch::kCPU;
    return devices;
  }
};

TEST_F(Cuda, UNetComputesTheSameAsTheUnpartitionedModel) {
  torch::manual_seed(1);
  auto model = models::unet(models::UNetOptions().depth(2).base_channels(4));
  model->to(torch::kFloat64);
  model->eval();  // running statistics: micro-batches do not change the function
  const auto x = torch::randn({4, 3, 16, 16}, torch::kFloat64).requires_grad_();
  const auto y = model->forward(x);
  const auto expected = torch::autograd::grad({y.pow(2).sum()}, {x})[0];
  const auto layers = static_cast<std::int64_t>(model->size());
  for (const bool mixed : {false, true}) {
    for (const auto checkpoint : kModes) {
      GPipe pipe(model, Balance{layers / 3, layers / 3, layers - 2 * (layers / 3)},
                 GPipeOptions().devices(devices(3, mixed)).chunks(2).checkpoint(checkpoint));
      const auto output = pipe->forward(x.to(torch::kCUDA));
      EXPECT_TRUE(torch::allclose(output.cpu(), y, 1e-9, 1e-11));
      const auto got = torch::autograd::grad({output.pow(2).sum()}, {x})[0];
      EXPECT_TRUE(torch::allclose(got.cpu(), expected, 1e-9, 1e-11));
    }
  }
}

TEST_F(Cuda, RecomputeDrawsTheSameNumbers) {
  torch::nn::Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(torch::nn::Linear(64, 64));
    model->push_back(torch::nn::Dropout(0.5));
  }
  const auto x = torch::randn({32, 64}, torch::kCUDA).requires_grad_();
  std::vector<Tensor> gradients;
  for (const auto checkpoint : kModes) {
    GPipe pipe(model, Balance{3, 5}, GPipeOptions().devices(devices(2, false)).chunks(4).checkpoint(checkpoint));
    torch::manual_seed(3);
    gradients.push_back(torch::autograd::grad({pipe->forward(x).sum()}, {x})[0]);
  }
  EXPECT_TRUE(torch::allclose(gradients[1], gradients[0]));
  EXPECT_TRUE(torch::allclose(gradients[2], gradients[0]));
}

}  // namespace
}  // namespace gpipe
