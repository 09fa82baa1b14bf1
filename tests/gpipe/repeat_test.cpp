// A seed determines every bit of a training step, independently of the order in which threads run.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "models/unet.h"
#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

void append(std::string& bits, const Tensor& tensor) {
  const auto values = tensor.detach().contiguous();
  bits.append(static_cast<const char*>(values.data_ptr()), values.nbytes());
}

TEST(Repeat, AHundredRunsOfOneSeedHaveOneHash) {
  torch::manual_seed(1);
  auto model = models::unet(models::UNetOptions().in_channels(1).depth(2).base_channels(2).dropout(0.3));
  const auto layers = static_cast<std::int64_t>(model->size());
  GPipe pipe(model, {layers / 4, layers / 4, layers / 4, layers - layers / 4 * 3},
             GPipeOptions().devices(std::vector<torch::Device>(4, torch::kCPU)).chunks(4).intraop_threads(1));
  ASSERT_EQ(pipe->options().checkpoint(), Checkpoint::kExceptLast);
  const auto x = torch::randn({8, 1, 12, 12}).requires_grad_();
  const auto before = copies(model->buffers());

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

TEST(Repeat, OneSeedRepeatsASequenceOfForwards) {
  Sequential model(Linear(6, 6), torch::nn::Dropout(0.4), torch::nn::Tanh(), Linear(6, 6), torch::nn::Dropout(0.4));
  GPipe pipe(model, {2, 2, 1}, GPipeOptions().chunks(4));
  const auto x = torch::randn({8, 6});
  torch::manual_seed(11);
  const auto first = pipe->forward(x);
  const auto next = pipe->forward(x);
  torch::manual_seed(11);
  EXPECT_TRUE(same(pipe->forward(x), first));
  EXPECT_TRUE(same(pipe->forward(x), next));
  EXPECT_FALSE(same(first, next));
}

TEST(Repeat, ACallDrawsOneSeedFromTheDefaultGenerator) {
  Sequential model(torch::nn::Dropout(0.4), Linear(6, 6), torch::nn::Dropout(0.4));
  GPipe pipe(model, {1, 2}, GPipeOptions().chunks(4).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({8, 6}).requires_grad_();
  torch::manual_seed(11);
  RandomScope::draw_seed();
  const auto expected = generator_state();
  torch::manual_seed(11);
  pipe->forward(x).sum().backward();
  EXPECT_TRUE(same(generator_state(), expected));
}

}  // namespace
}  // namespace gpipe
