#include "models/resnet.h"

#include <cmath>

#include "skip/layout.h"
#include "tests/gpipe/helpers.h"

namespace gpipe::models {
namespace {

ResNetOptions small() { return ResNetOptions().small_images(true).num_classes(10); }

TEST(ResNet, HasTheParametersOfTorchvision) {
  const std::pair<Sequential (*)(const ResNetOptions&), std::int64_t> counts[] = {{resnet18, 11'689'512},
                                                                                  {resnet50, 25'557'032}};
  for (const auto& [make, count] : counts) {
    const auto model = make({});
    EXPECT_EQ(parameter_count(model), count);
    verify_skippables(model);
    if (make != resnet50) continue;
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
}

TEST(ResNet, OptionsChangeStemAndHead) {
  using Shape = std::vector<std::int64_t>;
  const torch::NoGradGuard no_grad;
  const auto size_before_head = [](Sequential model, Tensor x) {
    model->eval();
    for (std::size_t i = 0; i + 3 < model->size(); ++i) x = model->begin()[static_cast<std::ptrdiff_t>(i)].forward(x);
    return x.sizes().vec();
  };
  EXPECT_EQ(size_before_head(resnet18(small().in_channels(1)), torch::rand({2, 1, 28, 28})), (Shape{2, 512, 4, 4}));
  EXPECT_EQ(size_before_head(resnet18(), torch::rand({2, 3, 64, 96})), (Shape{2, 512, 2, 3}));
  auto model = resnet18(small().in_channels(1));
  model->eval();
  for (const std::int64_t size : {1, 9}) {
    EXPECT_EQ(model->forward(torch::rand({3, 1, size, size + 2})).sizes(), (Shape{3, 10}));
  }
  EXPECT_THAT([] { resnet18(ResNetOptions().num_classes(0)); }, refused("num_classes is 0"));
  EXPECT_THAT([] { resnet50(ResNetOptions().in_channels(-1)); }, refused("in_channels is -1"));
}

}  // namespace
}  // namespace gpipe::models
