// The same contracts on a GPU; skipped where there is none.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "gpipe/gpipe.h"
#include "models/unet.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

using torch::Tensor;

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no CUDA device";
  }

  // Every stage on the first GPU, or every other one on the CPU.
  static std::vector<torch::Device> devices(std::size_t stages, bool mixed) {
    std::vector<torch::Device> devices(stages, torch::Device(torch::kCUDA, 0));
    for (std::size_t s = 1; mixed && s < stages; s += 2) devices[s] = torch::kCPU;
    return devices;
  }
};

TEST_F(CudaTest, UNetTrainsTheFunctionOfTheBareModel) {
  torch::manual_seed(1);
  auto model = models::unet(models::UNetOptions().depth(2).base_channels(4));
  model->to(torch::kFloat64);
  model->eval();  // running statistics: micro-batches do not change the function
  const auto x = torch::randn({4, 3, 16, 16}, torch::kFloat64).requires_grad_();
  const auto y = model->forward(x);
  const auto expected = torch::autograd::grad({y.pow(2).sum()}, {x})[0];
  const auto layers = static_cast<std::int64_t>(model->size());
  for (const bool mixed : {false, true}) {
    for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
      GPipe pipe(model, std::vector<std::int64_t>{layers / 3, layers / 3, layers - 2 * (layers / 3)},
                 GPipeOptions().devices(devices(3, mixed)).chunks(2).checkpoint(checkpoint));
      const auto output = pipe->forward(x.to(torch::kCUDA));
      EXPECT_TRUE(torch::allclose(output.cpu(), y, 1e-9, 1e-11));
      const auto got = torch::autograd::grad({output.pow(2).sum()}, {x})[0];
      EXPECT_TRUE(torch::allclose(got.cpu(), expected, 1e-9, 1e-11));
    }
  }
}

TEST_F(CudaTest, RecomputeDrawsTheSameNumbers) {
  torch::nn::Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(torch::nn::Linear(64, 64));
    model->push_back(torch::nn::Dropout(0.5));
  }
  const auto x = torch::randn({32, 64}, torch::kCUDA).requires_grad_();
  std::vector<Tensor> gradients;
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    GPipe pipe(model, std::vector<std::int64_t>{3, 5},
               GPipeOptions().devices(devices(2, false)).chunks(4).checkpoint(checkpoint));
    torch::manual_seed(3);
    gradients.push_back(torch::autograd::grad({pipe->forward(x).sum()}, {x})[0]);
  }
  EXPECT_TRUE(torch::allclose(gradients[1], gradients[0]));
  EXPECT_TRUE(torch::allclose(gradients[2], gradients[0]));
}

TEST_F(CudaTest, ScopesCatchOperatorsWithoutAGeneratorArgument) {
  const auto x = torch::ones({64, 64}, torch::kCUDA);
  const auto draw = [&](std::uint64_t seed) {
    RandomScope scope(seed, 0, 0);
    const auto dropped = std::get<0>(torch::native_dropout(x, 0.5, true));
    return torch::cat({dropped, torch::rand({64, 64}, torch::kCUDA), torch::dropout(x, 0.5, true)});
  };
  auto generator = at::globalContext().defaultGenerator(x.device());
  const auto state = generator.get_state();
  EXPECT_TRUE(torch::equal(draw(1), draw(1)));
  EXPECT_FALSE(torch::equal(draw(1), draw(2)));
  EXPECT_TRUE(torch::equal(generator.get_state(), state));
}

}  // namespace
}  // namespace gpipe
