#include "models/resnet.h"

#include <cmath>
#include <filesystem>
#include <iterator>
#include <regex>

#include "gpipe/snapshot/safetensors.h"
#include "skip/layout.h"
#include "tests/gpipe/helpers.h"

namespace gpipe::models {
namespace {

ResNetOptions small() { return ResNetOptions().small_images(true).num_classes(10); }

std::vector<torch::Device> cpus(std::size_t count) { return std::vector<torch::Device>(count, torch::kCPU); }

/// The parameters and buffers by name.
auto state_of(const torch::nn::Module& model) {
  auto state = model.named_parameters();
  state.update(model.named_buffers());
  return state;
}

// tests/python/test_models.py compares names, connections and outputs with torchvision's models.
TEST(ResNet, HasTheParameterCountsOfTorchvision) {
  const std::pair<Sequential (*)(const ResNetOptions&), std::int64_t> counts[] = {{resnet18, 11'689'512},
                                                                                  {resnet34, 21'797'672},
                                                                                  {resnet50, 25'557'032},
                                                                                  {resnet101, 44'549'160},
                                                                                  {resnet152, 60'192'808}};
  for (const auto& [make, count] : counts) {
    const auto model = make({});
    EXPECT_EQ(parameter_count(model), count);
    verify_skippables(model);
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

TEST(ResNet, ErrorsNameTheOptionAndItsValue) {
  EXPECT_THAT([] { resnet18(ResNetOptions().num_classes(0)); }, throws<std::invalid_argument>("num_classes is 0"));
  EXPECT_THAT([] { resnet50(ResNetOptions().in_channels(-1)); }, throws<std::invalid_argument>("in_channels is -1"));
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

bool holds(const torch::nn::Module& model, const State& state) {
  const auto ours = state_of(model);
  for (const auto& [key, value] : state) {
    if (!torch::equal(ours[from_torchvision(key)].detach().cpu(), value)) return false;
  }
  return ours.size() == state.size();
}

TEST(FromTorchvision, ConvertsKeysAsDocumented) {
  for (const auto& [theirs, ours] : std::map<std::string, std::string>{
           {"conv1.weight", "conv1.weight"},
           {"fc.bias", "fc.bias"},
           {"layer1.0.conv1.weight", "layer1_0_conv1.weight"},
           {"layer3.22.bn3.running_var", "layer3_22_bn3.running_var"},
           {"layer1.0.downsample.0.weight", "layer1_0_join.downsample.0.weight"},
           {"layer4.0.downsample.1.num_batches_tracked", "layer4_0_stash.downsample.1.num_batches_tracked"},
           {"layer1.weight", "layer1.weight"},
           {"other", "other"},
           {"", ""},
       }) {
    EXPECT_EQ(from_torchvision(theirs), ours);
  }
}

class LoadTorchvision : public ::testing::Test {
 protected:
  /// Expects loading to fail with a message that contains both texts, and to leave the model unchanged.
  template <typename Error, typename Source>
  void refuses(const Source& source, const std::string& text, const std::string& other = "") {
    const auto before = model_->parameters().front().clone();
    EXPECT_THAT([&] { load_torchvision(*model_, source); },
                ::testing::ThrowsMessage<Error>(AllOf(HasSubstr(text), HasSubstr(other))));
    EXPECT_TRUE(torch::equal(model_->parameters().front(), before));
  }

  Sequential model_ = resnet18(small());
  State state_ = random_state(model_);
};

TEST_F(LoadTorchvision, LoadsIntoAModelAndAPipeline) {
  load_torchvision(*model_, state_);
  EXPECT_TRUE(holds(*model_, state_));
  auto model = resnet18(small());
  GPipe pipe(model, {30, static_cast<std::int64_t>(model->size()) - 30}, GPipeOptions().devices(cpus(2)));
  load_torchvision(*pipe, state_);
  EXPECT_TRUE(holds(*pipe, state_));
}

TEST_F(LoadTorchvision, AcceptsOtherTypesAndStatesWithoutCounters) {
  for (auto entry = state_.begin(); entry != state_.end();) {
    entry = entry->first.ends_with(".num_batches_tracked") ? state_.erase(entry) : std::next(entry);
  }
  state_["fc.bias"] = state_["fc.bias"].to(torch::kFloat64);
  model_->forward(torch::randn({2, 3, 8, 8}));  // counts
  load_torchvision(*model_, state_);
  EXPECT_EQ(model_->named_buffers()["bn1.num_batches_tracked"].item<int>(), 0);
  EXPECT_TRUE(torch::equal(model_->named_parameters()["fc.bias"].to(torch::kFloat64), state_["fc.bias"]));
  EXPECT_TRUE(torch::equal(model_->named_buffers()["layer2_0_stash.downsample.1.running_var"],
                           state_["layer2.0.downsample.1.running_var"]));
}

TEST_F(LoadTorchvision, ErrorsNameTheFirstKeyThatDoesNotFit) {
  auto unexpected = state_;
  unexpected["layer1.0.bn3.bias"] = torch::rand({256});
  refuses<std::invalid_argument>(unexpected, "unexpected key 'layer1.0.bn3.bias'", "no 'layer1_0_bn3.bias'");
  auto missing = state_;
  missing.erase("layer2.0.downsample.0.weight");
  refuses<std::invalid_argument>(missing, "no key for the model's 'layer2_0_stash.downsample.0.weight'");
  auto other_shape = state_;
  other_shape["fc.weight"] = torch::rand({1000, 512});
  refuses<std::invalid_argument>(other_shape, "'fc.weight' has the shape [1000, 512]", "has [10, 512]");
  auto undefined = state_;
  undefined["fc.weight"] = Tensor();
  refuses<std::invalid_argument>(undefined, "'fc.weight' has the shape none");
  auto twice = state_;
  twice["layer1_0_conv1.weight"] = state_["layer1.0.conv1.weight"];
  refuses<std::invalid_argument>(twice, "unexpected key 'layer1_0_conv1.weight'");
}

TEST_F(LoadTorchvision, ReadsAFile) {
  const TemporaryDirectory directory;
  const auto path = directory / "weights.safetensors";
  write_safetensors(path, {.tensors = state_, .training = ""});
  load_torchvision(*model_, path);
  EXPECT_TRUE(holds(*model_, state_));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  refuses<std::runtime_error>(path, "cannot read '" + path.string() + "': ");
}

}  // namespace
}  // namespace gpipe::models
