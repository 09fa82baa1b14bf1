#include "models/resnet.h"

#include <cmath>
#include <filesystem>
#include <regex>

#include "gpipe/snapshot/safetensors.h"
#include "skip/layout.h"
#include "tests/gpipe/helpers.h"

namespace gpipe::models {
namespace {

ResNetOptions small() { return ResNetOptions().small_images(true).num_classes(10); }

/// The parameters and buffers by name.
auto state_of(const torch::nn::Module& model) {
  auto state = model.named_parameters();
  state.update(model.named_buffers());
  return state;
}

// tests/python/test_models.py compares the state and the outputs of two of them with torchvision's models.
TEST(ResNet, HasTheParametersOfTorchvision) {
  const std::pair<Sequential (*)(const ResNetOptions&), std::int64_t> counts[] = {{resnet18, 11'689'512},
                                                                                  {resnet34, 21'797'672},
                                                                                  {resnet50, 25'557'032},
                                                                                  {resnet101, 44'549'160},
                                                                                  {resnet152, 60'192'808}};
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

using State = std::map<std::string, Tensor>;

/// Random values for torchvision's keys, in the shapes of the model.
State random_state(const Sequential& model) {
  static const std::regex in_block("layer(\\d)_(\\d+)_(stash\\.|join\\.)?");
  State state;
  for (const auto& ours : state_of(*model)) {
    const auto& like = ours.value();
    state[std::regex_replace(ours.key(), in_block, "layer$1.$2.")] =
        like.is_floating_point() ? torch::rand(like.sizes()) : torch::randint(1, 100, like.sizes(), like.options());
  }
  return state;
}

class LoadTorchvision : public ::testing::Test {
 protected:
  /// Expects a module to have all values of the state.
  void expect_loaded(const torch::nn::Module& model) const {
    const auto ours = state_of(model);
    EXPECT_EQ(ours.size(), state_.size());
    for (const auto& [key, value] : state_) {
      EXPECT_TRUE(torch::equal(ours[from_torchvision(key)].detach(), value)) << key;
    }
  }

  Sequential model_ = resnet18(small());
  State state_ = random_state(model_);
};

TEST_F(LoadTorchvision, LoadsAFileIntoAPipelineAndOtherTypesIntoAModel) {
  GPipe pipe(model_, {30, static_cast<std::int64_t>(model_->size()) - 30});
  const TemporaryDirectory directory;
  const auto path = directory / "weights.safetensors";
  write_safetensors(path, {.tensors = state_, .model = ""});
  load_torchvision(*pipe, path);
  expect_loaded(*pipe);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_THAT([&] { load_torchvision(*pipe, path); },
              throws<std::runtime_error>("cannot read '" + path.string() + "': "));

  std::erase_if(state_, [](const auto& entry) { return entry.first.ends_with(".num_batches_tracked"); });
  state_["fc.bias"] = state_["fc.bias"].to(torch::kFloat64) + 1;
  model_->forward(torch::randn({2, 3, 8, 8}));  // counts
  load_torchvision(*model_, state_);
  EXPECT_EQ(model_->named_buffers()["bn1.num_batches_tracked"].item<int>(), 0);
  EXPECT_TRUE(torch::allclose(model_->named_parameters()["fc.bias"].to(torch::kFloat64), state_["fc.bias"]));
}

TEST_F(LoadTorchvision, ErrorsNameTheFirstKeyThatDoesNotFit) {
  const auto before = copies(model_->parameters());
  const std::pair<std::function<void(State&)>, std::string> cases[] = {
      {[](auto& state) { state["layer1.0.bn3.bias"] = torch::rand({256}); }, "unexpected key 'layer1.0.bn3.bias'"},
      {[](auto& state) { state.erase("layer2.0.downsample.0.weight"); },
       "no key for the model's 'layer2_0_stash.downsample.0.weight'"},
      {[](auto& state) {
         state["fc.weight"] = torch::rand({1000, 512});
       },
       "'fc.weight' has the shape [1000, 512]"},
      {[](auto& state) { state["fc.weight"] = Tensor(); }, "'fc.weight' has the shape none"},
      {[](auto& state) { state["layer1_0_conv1.weight"] = state["layer1.0.conv1.weight"]; },
       "unexpected key 'layer1_0_conv1.weight'"}};
  for (const auto& [change, text] : cases) {
    auto state = state_;
    change(state);
    EXPECT_THAT([&] { load_torchvision(*model_, state); }, refused(text));
    EXPECT_TRUE(same(model_->parameters(), before));
  }
}

}  // namespace
}  // namespace gpipe::models
