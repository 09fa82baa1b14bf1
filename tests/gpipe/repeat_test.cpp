// What a seed determines: every bit of a training step, however the threads happen to run.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "gpipe/gpipe.h"
#include "models/unet.h"

namespace gpipe {
namespace {

void append(std::string& bits, const torch::Tensor& tensor) {
  const auto values = tensor.detach().contiguous();
  bits.append(static_cast<const char*>(values.data_ptr()), values.nbytes());
}

TEST(RepeatTest, AHundredRunsOfOneSeedHaveOneHash) {
  torch::manual_seed(1);
  auto model = models::unet(models::UNetOptions().in_channels(1).depth(2).base_channels(2).dropout(0.3));
  const auto layers = static_cast<std::int64_t>(model->size());
  GPipe pipe(model, {layers / 4, layers / 4, layers / 4, layers - layers / 4 * 3},
             GPipeOptions().devices(std::vector<torch::Device>(4, torch::kCPU)).chunks(4).intraop_threads(1));
  ASSERT_EQ(pipe->options().checkpoint(), Checkpoint::kExceptLast);
  const auto x = torch::randn({8, 1, 12, 12}).requires_grad_();
  std::vector<torch::Tensor> before;
  for (const auto& buffer : model->buffers()) before.push_back(buffer.clone());

  const auto hash_of_run = [&](std::uint64_t seed) {
    for (std::size_t i = 0; i < before.size(); ++i) model->buffers()[i].copy_(before[i]);
    model->zero_grad();
    x.mutable_grad().reset();
    torch::manual_seed(seed);
    const auto output = pipe->forward(x);
    output.square().sum().backward();
    std::string bits;
    append(bits, output);
    append(bits, x.grad());
    for (const auto& parameter : model->parameters()) append(bits, parameter.grad());
    for (const auto& buffer : model->buffers()) append(bits, buffer);
    return std::hash<std::string_view>()(bits);
  };
  std::set<std::size_t> hashes;
  for (int run = 0; run < 100; ++run) hashes.insert(hash_of_run(2));
  EXPECT_EQ(hashes.size(), 1u);
  EXPECT_FALSE(hashes.contains(hash_of_run(3)));
}

}  // namespace
}  // namespace gpipe
