#include "models/unet.h"

#include <limits>

#include "balance/model.h"
#include "tests/gpipe/helpers.h"

namespace gpipe::models {
namespace {

UNetOptions tiny() { return UNetOptions().base_channels(2).depth(2); }

torch::Tensor image(std::int64_t height, std::int64_t width) { return torch::rand({2, 3, height, width}); }

TEST(UNet, HasTheParametersAndLayersOfItsOptions) {
  EXPECT_EQ(parameter_count(unet()), 31'037'633);
  EXPECT_EQ(layer_names(unet(tiny().depth(1).dropout(0.5))),
            (std::vector<std::string>{
                "down1_conv1",   "down1_norm1",  "down1_relu1",  "down1_conv2",    "down1_norm2",  "down1_relu2",
                "down1_dropout", "down1_stash",  "down1_pool",   "bottom_conv1",   "bottom_norm1", "bottom_relu1",
                "bottom_conv2",  "bottom_norm2", "bottom_relu2", "bottom_dropout", "up1_upsample", "up1_join",
                "up1_conv1",     "up1_norm1",    "up1_relu1",    "up1_conv2",      "up1_norm2",    "up1_relu2",
                "up1_dropout",   "head"}));
}

TEST(UNet, JoinsConcatenateTheSkipAndTheUpsampledTensor) {
  auto model = unet(tiny().depth(1));
  const auto names = layer_names(model);
  auto x = image(6, 6);
  std::map<std::string, torch::Tensor> outputs;
  for (std::size_t i = 0; i < names.size(); ++i) {
    x = model->begin()[static_cast<std::ptrdiff_t>(i)].forward(x);
    outputs[names[i]] = x.clone();
  }
  EXPECT_TRUE(torch::equal(outputs["up1_join"], torch::cat({outputs["down1_stash"], outputs["up1_upsample"]}, 1)));
}

TEST(UNet, KeepsTheSpatialSizeAndGivesEveryParameterAGradient) {
  auto model = unet(tiny().dropout(0.25).out_channels(2));
  const auto x = image(7, 7).requires_grad_();
  EXPECT_FALSE(torch::equal(model->forward(x), model->forward(x))) << "dropout";
  model->forward(x).square().sum().backward();
  EXPECT_TRUE(x.grad().defined());
  for (const auto& parameter : model->named_parameters()) {
    ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
  }
  model->eval();
  EXPECT_TRUE(torch::equal(model->forward(x), model->forward(x)));
  for (const auto& [height, width] : {std::pair(8, 12), std::pair(7, 5), std::pair(9, 1), std::pair(1, 1)}) {
    const auto sample = image(height, width);
    EXPECT_EQ(model->forward(sample).sizes().slice(2), sample.sizes().slice(2));
  }
}

TEST(UNet, OneModelCanContainSeveral) {
  auto first = unet(tiny().out_channels(3));
  auto second = unet(tiny());
  torch::nn::Sequential chain;
  chain->extend(*first);
  chain->extend(*second);
  verify_skippables(chain);
  chain->eval();
  const auto x = image(5, 6);
  EXPECT_TRUE(torch::equal(chain->forward(x), second->forward(first->forward(x))));
}

// All stages on the first GPU, or the second stage on the CPU. Skipped on machines without a GPU.
TEST(Cuda, UNetComputesTheSameAsTheUnpartitionedModel) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no CUDA device";
  const torch::Device gpu(torch::kCUDA, 0);
  torch::manual_seed(1);
  auto model = unet(UNetOptions().depth(2).base_channels(4));
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

TEST(UNet, ErrorsNameTheOptionAndItsValue) {
  for (const auto& [options, error] : std::vector<std::pair<UNetOptions, std::string>>{
           {UNetOptions().in_channels(0), "in_channels is 0"},
           {UNetOptions().base_channels(0), "base_channels is 0"},
           {UNetOptions().depth(17), "depth is 17"},
           {UNetOptions().dropout(1), "dropout is 1"},
           {UNetOptions().dropout(std::numeric_limits<double>::quiet_NaN()), "dropout is nan"},
       }) {
    EXPECT_THAT([&bad = options] { unet(bad); }, refused(error));
  }
}

}  // namespace
}  // namespace gpipe::models
