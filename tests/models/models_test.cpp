// The models: their layers, sizes and options.
#include <cmath>
#include <limits>

#include "balance/model.h"
#include "models/resnet.h"
#include "models/unet.h"
#include "skip/layout.h"
#include "tests/gpipe/helpers.h"

namespace gpipe::models {
namespace {

TEST(ResNet, HasTheParametersOfTorchvision) {
  EXPECT_EQ(parameter_count(resnet18()), 11'689'512);
  const auto model = resnet50();
  EXPECT_EQ(parameter_count(model), 25'557'032);
  verify_skippables(model);
  for (const auto& parameter : model->named_parameters()) {
    const auto& key = parameter.key();
    const auto& value = parameter.value();
    if (value.dim() == 4) {
      const auto fan_out = static_cast<double>(value.size(0) * value.size(2) * value.size(3));
      EXPECT_NEAR(value.std().item<double>() * std::sqrt(fan_out / 2), 1, 0.1) << key;
    } else if (key.starts_with("fc.")) {
      EXPECT_LE(value.abs().max().item<double>(), 1 / std::sqrt(2048)) << key;
    } else {
      EXPECT_TRUE(torch::equal(value, torch::full_like(value, key.ends_with("weight") ? 1 : 0))) << key;
    }
  }
}

TEST(ResNet, OptionsChangeStemAndHead) {
  const torch::NoGradGuard no_grad;
  const auto size_before_head = [](Sequential model, Tensor x) {
    model->eval();
    for (std::size_t i = 0; i + 3 < model->size(); ++i) x = model->begin()[static_cast<std::ptrdiff_t>(i)].forward(x);
    return x.sizes().vec();
  };
  auto small = resnet18(ResNetOptions().small_images(true).num_classes(10).in_channels(1));
  EXPECT_THAT(size_before_head(small, torch::rand({2, 1, 28, 28})), ElementsAre(2, 512, 4, 4));
  EXPECT_THAT(size_before_head(resnet18(), torch::rand({2, 3, 64, 96})), ElementsAre(2, 512, 2, 3));
  EXPECT_THAT(small->forward(torch::rand({3, 1, 1, 3})).sizes().vec(), ElementsAre(3, 10));
}

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
  std::map<std::string, torch::Tensor> outputs;
  auto x = image(6, 6);
  for (std::size_t i = 0; i < model->size(); ++i) {
    x = model->begin()[static_cast<std::ptrdiff_t>(i)].forward(x);
    outputs[layer_names(model)[i]] = x.clone();
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
    EXPECT_TRUE(parameter.value().grad().defined()) << parameter.key();
  }
  model->eval();
  for (const auto& [height, width] : {std::pair(8, 12), std::pair(7, 5), std::pair(9, 1), std::pair(1, 1)}) {
    const auto sample = image(height, width);
    EXPECT_EQ(model->forward(sample).sizes().slice(2), sample.sizes().slice(2));
  }
}

TEST(Models, ErrorsNameTheOptionAndItsValue) {
  const std::pair<UNetOptions, std::string> cases[] = {
      {UNetOptions().in_channels(0), "in_channels is 0"},
      {UNetOptions().base_channels(0), "base_channels is 0"},
      {UNetOptions().depth(17), "depth is 17"},
      {UNetOptions().dropout(1), "dropout is 1"},
      {UNetOptions().dropout(std::numeric_limits<double>::quiet_NaN()), "dropout is nan"}};
  for (const auto& it : cases) EXPECT_THAT([&] { unet(it.first); }, refused(it.second));
  EXPECT_THAT([] { resnet18(ResNetOptions().num_classes(0)); }, refused("num_classes is 0"));
  EXPECT_THAT([] { resnet50(ResNetOptions().in_channels(-1)); }, refused("in_channels is -1"));
}

}  // namespace
}  // namespace gpipe::models
