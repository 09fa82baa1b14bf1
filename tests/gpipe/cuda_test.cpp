// Pipelines on a GPU. Skipped on machines without one.
#include "models/unet.h"
#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

// All stages on the first GPU, or the second stage on the CPU.
TEST(Cuda, UNetComputesTheSameAsTheUnpartitionedModel) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no CUDA device";
  const torch::Device gpu(torch::kCUDA, 0);
  torch::manual_seed(1);
  auto model = models::unet(models::UNetOptions().depth(2).base_channels(4));
  model->to(torch::kFloat64);
  model->eval();  // running statistics: micro-batches do not change the function
  const auto x = torch::randn({4, 3, 16, 16}, torch::kFloat64).requires_grad_();
  const auto y = model->forward(x);
  const auto expected = gradient_of(y.pow(2).sum(), x);
  const auto third = static_cast<std::int64_t>(model->size()) / 3;
  const Balance balance = {third, third, static_cast<std::int64_t>(model->size()) - 2 * third};
  for (const auto second : {gpu, torch::Device(torch::kCPU)}) {
    for (const auto checkpoint : kModes) {
      GPipe pipe(model, balance, in_chunks(2, checkpoint).devices({gpu, second, gpu}));
      const auto output = pipe->forward(x.to(torch::kCUDA));
      EXPECT_TRUE(torch::allclose(output.cpu(), y, 1e-9, 1e-11));
      EXPECT_TRUE(torch::allclose(gradient_of(output.pow(2).sum(), x).cpu(), expected, 1e-9, 1e-11));
    }
  }
}

}  // namespace
}  // namespace gpipe
