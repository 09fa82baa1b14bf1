#include <limits>

#include "models/unet.h"

#include "balance/model.h"
#include "tests/gpipe/helpers.h"

namespace gpipe::models {
namespace {

UNetOptions tiny() { return UNetOptions().base_channels(2).depth(2); }

torch::Tensor image(std::vector<std::int64_t> spatial) {
  spatial.insert(spatial.begin(), {2, 3});
  return torch::rand(spatial);
}

TEST(UNet, HasTheUsualParameterCountByDefault) { EXPECT_EQ(parameter_count(unet()), 31'037'633); }

TEST(UNet, ParameterCountsFollowTheOptions) {
  const auto count = [](std::int64_t dims, Upsampling upsampling) {
    const auto options = UNetOptions().in_channels(5).out_channels(4).depth(3).base_channels(3).convolutions(3);
    return parameter_count(unet(UNetOptions(options).dims(dims).upsampling(upsampling)));
  };
  EXPECT_EQ(count(2, Upsampling::kTransposed), 26'056);
  EXPECT_EQ(count(3, Upsampling::kTransposed), 75'790);
  EXPECT_EQ(count(2, Upsampling::kLinear), 24'922);
  EXPECT_EQ(count(3, Upsampling::kLinear), 73'144);
}

TEST(UNet, LayerNamesAreAsDocumented) {
  EXPECT_EQ(layer_names(unet(
                UNetOptions().base_channels(2).depth(1).convolutions(1).dropout(0.5).upsampling(Upsampling::kLinear))),
            (std::vector<std::string>{"down1_conv1", "down1_norm1", "down1_relu1", "down1_dropout", "down1_stash",
                                      "down1_pool", "bottom_conv1", "bottom_norm1", "bottom_relu1", "bottom_dropout",
                                      "up1_reduce", "up1_upsample", "up1_join", "up1_conv1", "up1_norm1", "up1_relu1",
                                      "up1_dropout", "head"}));
  const auto names = layer_names(unet(tiny().depth(4)));
  EXPECT_EQ(names.size(), 4 * 8 + 6 + 4 * 8 + 1);
  EXPECT_THAT(names, ::testing::IsSupersetOf({"down4_conv2", "up4_upsample", "up3_norm2"}));
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

class UNetVariants : public ::testing::TestWithParam<std::tuple<std::int64_t, Upsampling, double>> {
 protected:
  UNetOptions options() const {
    const auto [dims, upsampling, dropout] = GetParam();
    return tiny().dims(dims).upsampling(upsampling).dropout(dropout).out_channels(2);
  }
};

TEST_P(UNetVariants, KeepTheSpatialSize) {
  auto model = unet(options());
  model->eval();
  const torch::NoGradGuard no_grad;
  for (const auto& size : {std::vector<std::int64_t>{8, 12, 4}, {7, 5, 6}, {9, 1, 3}, {1, 1, 1}}) {
    const std::vector<std::int64_t> spatial(size.begin(), size.begin() + options().dims());
    std::vector<std::int64_t> expected{2, 2};
    expected.insert(expected.end(), spatial.begin(), spatial.end());
    EXPECT_EQ(model->forward(image(spatial)).sizes(), expected);
  }
}

TEST_P(UNetVariants, EveryParameterGetsAGradient) {
  auto model = unet(options());
  model->train();
  const auto x = image(std::vector<std::int64_t>(options().dims(), 7)).requires_grad_();
  model->forward(x).square().sum().backward();
  EXPECT_TRUE(x.grad().defined());
  for (const auto& parameter : model->named_parameters()) {
    ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
    EXPECT_TRUE(parameter.value().grad().isfinite().all().item<bool>()) << parameter.key();
  }
}

INSTANTIATE_TEST_SUITE_P(, UNetVariants,
                         ::testing::Combine(::testing::Values(2, 3),
                                            ::testing::Values(Upsampling::kTransposed, Upsampling::kLinear),
                                            ::testing::Values(0.0, 0.25)));

TEST(UNet, DropoutIsActiveOnlyInTraining) {
  auto model = unet(tiny().dropout(0.5));
  const auto x = image({8, 8});
  torch::manual_seed(1);
  const auto first = model->forward(x);
  EXPECT_FALSE(torch::equal(first, model->forward(x)));
  model->eval();
  EXPECT_TRUE(torch::equal(model->forward(x), model->forward(x)));
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
           {UNetOptions().out_channels(-2), "out_channels is -2"},
           {UNetOptions().base_channels(0), "base_channels is 0"},
           {UNetOptions().convolutions(0), "convolutions is 0"},
           {UNetOptions().depth(0), "depth is 0"},
           {UNetOptions().depth(17), "depth is 17"},
           {UNetOptions().dropout(-0.5), "dropout is -0.5"},
           {UNetOptions().dropout(1), "dropout is 1"},
           {UNetOptions().dropout(std::numeric_limits<double>::quiet_NaN()), "dropout is nan"},
           {UNetOptions().dims(1), "dims is 1"},
           {UNetOptions().dims(4), "dims is 4"},
       }) {
    EXPECT_THAT([&bad = options] { unet(bad); }, throws<std::invalid_argument>(error));
  }
}

}  // namespace
}  // namespace gpipe::models
