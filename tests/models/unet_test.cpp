#include "models/unet.h"

#include <limits>

#include "balance/model.h"
#include "tests/gpipe/helpers.h"

namespace gpipe::models {
namespace {

UNetOptions tiny() { return UNetOptions().base_channels(2).depth(2); }

torch::Tensor image(std::vector<std::int64_t> spatial) {
  spatial.insert(spatial.begin(), {2, 3});
  return torch::rand(spatial);
}

TEST(UNet, HasTheParametersAndLayersOfItsOptions) {
  EXPECT_EQ(parameter_count(unet()), 31'037'633);
  const auto count = [](std::int64_t dims, Upsampling upsampling) {
    const auto options = UNetOptions().in_channels(5).out_channels(4).depth(3).base_channels(3).convolutions(3);
    return parameter_count(unet(UNetOptions(options).dims(dims).upsampling(upsampling)));
  };
  EXPECT_EQ(count(2, Upsampling::kTransposed), 26'056);
  EXPECT_EQ(count(3, Upsampling::kTransposed), 75'790);
  EXPECT_EQ(count(2, Upsampling::kLinear), 24'922);
  EXPECT_EQ(count(3, Upsampling::kLinear), 73'144);
  EXPECT_EQ(layer_names(unet(tiny().depth(1).convolutions(1).dropout(0.5).upsampling(Upsampling::kLinear))),
            (std::vector<std::string>{"down1_conv1", "down1_norm1", "down1_relu1", "down1_dropout", "down1_stash",
                                      "down1_pool", "bottom_conv1", "bottom_norm1", "bottom_relu1", "bottom_dropout",
                                      "up1_reduce", "up1_upsample", "up1_join", "up1_conv1", "up1_norm1", "up1_relu1",
                                      "up1_dropout", "head"}));
}

TEST(UNet, JoinsConcatenateTheSkipAndTheUpsampledTensor) {
  auto model = unet(tiny().depth(1));
  const auto names = layer_names(model);
  auto x = image({6, 6});
  std::map<std::string, torch::Tensor> outputs;
  for (std::size_t i = 0; i < names.size(); ++i) {
    x = model->begin()[static_cast<std::ptrdiff_t>(i)].forward(x);
    outputs[names[i]] = x.clone();
  }
  EXPECT_TRUE(torch::equal(outputs["up1_join"], torch::cat({outputs["down1_stash"], outputs["up1_upsample"]}, 1)));
}

TEST(UNet, KeepsTheSpatialSizeAndGivesEveryParameterAGradient) {
  for (const std::int64_t dims : {2, 3}) {
    for (const auto upsampling : {Upsampling::kTransposed, Upsampling::kLinear}) {
      auto model = unet(tiny().dims(dims).upsampling(upsampling).dropout(0.25).out_channels(2));
      const auto x = image(std::vector<std::int64_t>(dims, 7)).requires_grad_();
      EXPECT_FALSE(torch::equal(model->forward(x), model->forward(x))) << "dropout";
      model->forward(x).square().sum().backward();
      EXPECT_TRUE(x.grad().defined());
      for (const auto& parameter : model->named_parameters()) {
        ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
      }
      model->eval();
      EXPECT_TRUE(torch::equal(model->forward(x), model->forward(x)));
      for (auto spatial : {std::vector<std::int64_t>{8, 12, 4}, {7, 5, 6}, {9, 1, 3}, {1, 1, 1}}) {
        spatial.resize(dims);
        const auto sample = image(spatial);
        EXPECT_EQ(model->forward(sample).sizes().slice(2), sample.sizes().slice(2));
      }
    }
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
  const auto x = image({5, 6});
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
           {UNetOptions().convolutions(0), "convolutions is 0"},
           {UNetOptions().depth(17), "depth is 17"},
           {UNetOptions().dropout(1), "dropout is 1"},
           {UNetOptions().dropout(std::numeric_limits<double>::quiet_NaN()), "dropout is nan"},
           {UNetOptions().dims(4), "dims is 4"},
       }) {
    EXPECT_THAT([&bad = options] { unet(bad); }, refused(error));
  }
}

}  // namespace
}  // namespace gpipe::models
