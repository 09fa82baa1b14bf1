#include "models/resnet.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/gpipe.h"
#include "skip/layout.h"
#include "tests/models/resnets.h"
#include "tests/models/sequentials.h"

namespace gpipe::models {
namespace {

using testing::architectures;
using testing::cpus;
using ::testing::HasSubstr;
using testing::layer_names;
using testing::parameter_count;
using testing::small;
using testing::torchvision_keys;
using testing::warm_up;
using torch::Tensor;
using torch::nn::Sequential;

std::vector<std::string> state_keys(const Sequential& model) {
  auto keys = model->named_parameters().keys();
  for (const auto& key : model->named_buffers().keys()) keys.push_back(key);
  return keys;
}

TEST(ResNet, HasTheParameterCountsAndStateKeysOfTorchvision) {
  for (const auto& architecture : architectures()) {
    SCOPED_TRACE(architecture.name);
    const auto model = architecture.make({});
    EXPECT_EQ(parameter_count(model), architecture.parameters);
    verify_skippables(model);
    std::vector<std::string> expected;
    for (const auto& key : torchvision_keys(architecture)) expected.push_back(from_torchvision(key));
    EXPECT_THAT(state_keys(model), ::testing::UnorderedElementsAreArray(expected));
  }
}

TEST(ResNet, LayerNamesAreAsDocumented) {
  const auto names = layer_names(resnet18());
  EXPECT_EQ(names.size(), 4 + 8 * 8 + 3);
  EXPECT_EQ(std::vector<std::string>(names.begin(), names.begin() + 13),
            (std::vector<std::string>{"conv1", "bn1", "relu", "maxpool", "layer1_0_stash", "layer1_0_conv1",
                                      "layer1_0_bn1", "layer1_0_relu1", "layer1_0_conv2", "layer1_0_bn2",
                                      "layer1_0_join", "layer1_0_relu2", "layer1_1_stash"}));
  EXPECT_EQ(std::vector<std::string>(names.end() - 5, names.end()),
            (std::vector<std::string>{"layer4_1_join", "layer4_1_relu2", "avgpool", "flatten", "fc"}));
  EXPECT_THAT(layer_names(resnet50()),
              ::testing::IsSupersetOf({"layer1_2_conv3", "layer1_2_bn3", "layer1_2_join", "layer1_2_relu3"}));
  EXPECT_THAT(layer_names(resnet18(small())), ::testing::Not(::testing::Contains("maxpool")));
}

TEST(ResNet, SkipsConnectTheBeginningAndEndOfEachBlock) {
  const auto model = resnet50(small());
  std::vector<NamedLayer> layers;
  for (const auto& child : model->named_children()) layers.push_back({child.key(), child.value()});
  const auto links = skip_links(layers);
  EXPECT_EQ(links.size(), 16);
  for (const auto& link : links) {
    const auto block = link.key.name.substr(0, link.key.name.find("identity"));
    EXPECT_EQ(link.key.name, block + "identity");
    EXPECT_EQ(layers[link.from].name, block + "stash");
    EXPECT_EQ(layers[link.to].name, block + "join");
  }
}

TEST(ResNet, ProjectsAShortcutWhereTheSkipIsSmaller) {
  struct Sizes : SkipContext {
    void stash(const SkipKey& key, at::Tensor tensor) override {
      sizes[key.name] = tensor.sizes().vec();
      tensors[key] = std::move(tensor);
    }
    at::Tensor pop(const SkipKey& key) override { return tensors.extract(key).mapped(); }
    std::map<SkipKey, at::Tensor> tensors;
    std::map<std::string, std::vector<std::int64_t>> sizes;
  };
  auto model = resnet50(small());
  model->eval();
  const torch::NoGradGuard no_grad;
  Sizes context;
  {
    SkipContextGuard guard(context);
    model->forward(torch::rand({1, 3, 16, 16}));
  }
  using Shape = std::vector<std::int64_t>;
  EXPECT_EQ(context.sizes["layer1_0_identity"], (Shape{1, 64, 16, 16}));
  EXPECT_EQ(context.sizes["layer1_1_identity"], (Shape{1, 256, 16, 16}));
  EXPECT_EQ(context.sizes["layer2_0_identity"], (Shape{1, 512, 8, 8}));
  EXPECT_EQ(context.sizes["layer4_0_identity"], (Shape{1, 2048, 2, 2}));
}

TEST(ResNet, InitialValuesHaveTheDistributionsOfTorchvision) {
  torch::manual_seed(1);
  const auto model = resnet50();
  for (const auto& parameter : model->named_parameters()) {
    const auto& key = parameter.key();
    const auto& value = parameter.value();
    if (value.dim() == 4) {
      const auto fan_out = static_cast<double>(value.size(0) * value.size(2) * value.size(3));
      EXPECT_NEAR(value.std().item<double>() * std::sqrt(fan_out / 2), 1, 0.05) << key;
    } else if (key.starts_with("fc.")) {
      EXPECT_LE(value.abs().max().item<double>(), 1 / std::sqrt(2048)) << key;
    } else {
      EXPECT_TRUE(torch::equal(value, torch::full_like(value, key.ends_with("weight") ? 1 : 0))) << key;
    }
  }
}

TEST(ResNet, OptionsChangeStemAndHead) {
  const auto shape = [](const Sequential& model, const std::string& key) {
    return model->named_parameters()[key].sizes().vec();
  };
  using Shape = std::vector<std::int64_t>;
  const auto mnist = resnet18(small().in_channels(1));
  EXPECT_EQ(shape(mnist, "conv1.weight"), (Shape{64, 1, 3, 3}));
  EXPECT_EQ(shape(mnist, "fc.weight"), (Shape{10, 512}));
  EXPECT_EQ(shape(resnet50(), "conv1.weight"), (Shape{64, 3, 7, 7}));

  const torch::NoGradGuard no_grad;
  const auto size_before_head = [](Sequential model, Tensor x) {
    model->eval();
    for (std::size_t i = 0; i + 3 < model->size(); ++i) x = model->begin()[static_cast<std::ptrdiff_t>(i)].forward(x);
    return x.sizes().vec();
  };
  EXPECT_EQ(size_before_head(mnist, torch::rand({2, 1, 28, 28})), (Shape{2, 512, 4, 4}));
  EXPECT_EQ(size_before_head(resnet18(), torch::rand({2, 3, 64, 96})), (Shape{2, 512, 2, 3}));
  for (const auto& options : {ResNetOptions(small()).in_channels(1), ResNetOptions().num_classes(10).in_channels(1)}) {
    auto model = resnet18(options);
    model->eval();
    for (const std::int64_t size : {1, 9}) {
      EXPECT_EQ(model->forward(torch::rand({3, 1, size, size + 2})).sizes(), (Shape{3, 10}));
    }
  }
}

TEST(ResNet, EveryParameterGetsAGradient) {
  for (auto model : {resnet18(small()), resnet50(small())}) {
    model->train();
    const auto x = torch::rand({2, 3, 9, 9}).requires_grad_();
    model->forward(x).square().sum().backward();
    EXPECT_TRUE(x.grad().defined());
    for (const auto& parameter : model->named_parameters()) {
      ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
      EXPECT_TRUE(parameter.value().grad().isfinite().all().item<bool>()) << parameter.key();
    }
  }
}

// In evaluation mode, because in training mode each micro-batch is normalised separately.
TEST(ResNet, PipelineEqualsTheBareModelAtEveryCut) {
  torch::manual_seed(1);
  // Cuts after every fifth layer fall on every kind of layer.
  const auto fives = [](const Sequential& model) {
    const auto layers = static_cast<std::int64_t>(model->size());
    std::vector<std::int64_t> balance(layers / 5, 5);
    balance.back() += layers % 5;
    return balance;
  };
  const auto basic = resnet18(small());
  const auto bottleneck = resnet50(small());
  const std::vector<std::pair<Sequential, std::vector<std::vector<std::int64_t>>>> cases{
      {basic, {{3, 67}, {5, 10, 55}, fives(basic)}}, {bottleneck, {fives(bottleneck)}}};
  for (auto [model, balances] : cases) {
    model->to(torch::kFloat64);
    warm_up(model, {4, 3, 8, 8});
    const auto x = torch::randn({4, 3, 8, 8}, torch::kFloat64);
    const auto expected = model->forward(x);
    expected.square().sum().backward();
    std::vector<Tensor> gradients;
    for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
    for (const auto& balance : balances) {
      model->zero_grad();
      GPipe pipe(model, balance, GPipeOptions().chunks(2).devices(cpus(balance.size())));
      pipe->eval();
      const auto y = pipe->forward(x);
      EXPECT_TRUE(torch::allclose(y, expected, 1e-10, 1e-12)) << balance.size() << " stages";
      y.square().sum().backward();
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        ASSERT_TRUE(torch::allclose(model->parameters()[i].grad(), gradients[i], 1e-8, 1e-10))
            << balance.size() << " stages, " << model->named_parameters().keys()[i];
      }
    }
  }
}

// Cuts before each kind of layer that changes its input in place. Recomputes must still start from the original inputs.
TEST(ResNet, RecomputingPipelineHasTheSameGradients) {
  auto model = resnet18(small());
  const auto names = layer_names(model);
  std::vector<std::int64_t> balance{0};
  for (const auto& name : names) {
    const bool cut = name == "layer1_0_relu1" || name == "layer1_0_join" || name == "layer2_0_relu2";
    if (cut) balance.push_back(0);
    ++balance.back();
  }
  const auto x = torch::randn({4, 3, 8, 8});
  const auto gradients = [&](Checkpoint checkpoint) {
    GPipe pipe(model, balance, GPipeOptions().chunks(2).checkpoint(checkpoint).devices(cpus(balance.size())));
    model->zero_grad();
    pipe->train();
    pipe->forward(x).square().sum().backward();
    std::vector<Tensor> result;
    for (const auto& parameter : model->parameters()) result.push_back(parameter.grad().clone());
    return result;
  };
  const auto never = gradients(Checkpoint::kNever);
  const auto always = gradients(Checkpoint::kAlways);
  ASSERT_EQ(balance.size(), 4);
  for (std::size_t i = 0; i < never.size(); ++i) {
    EXPECT_TRUE(torch::equal(never[i], always[i])) << model->named_parameters().keys()[i];
  }
}

TEST(ResNet, OneModelCanContainSeveral) {
  auto first = resnet18(small());
  auto second = resnet18(small());
  Sequential chain;
  chain->extend(*first);
  chain->extend(*second);
  verify_skippables(chain);
}

TEST(ResNet, CloneComputesTheSame) {
  auto model = resnet50(small());
  warm_up(model, {2, 3, 8, 8});
  auto clone = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  const auto x = torch::rand({1, 3, 8, 8});
  EXPECT_TRUE(torch::equal(clone->forward(x), model->forward(x)));
}

TEST(ResNet, ErrorsNameTheOptionAndItsValue) {
  EXPECT_THAT([] { resnet18(ResNetOptions().num_classes(0)); },
              ::testing::ThrowsMessage<std::invalid_argument>(HasSubstr("num_classes is 0")));
  EXPECT_THAT([] { resnet50(ResNetOptions().in_channels(-1)); },
              ::testing::ThrowsMessage<std::invalid_argument>(HasSubstr("in_channels is -1")));
}

}  // namespace
}  // namespace gpipe::models
