#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <filesystem>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

#include "gpipe/gpipe.h"
#include "gpipe/snapshot/safetensors.h"
#include "models/resnet.h"
#include "tests/models/resnets.h"

namespace gpipe::models {
namespace {

using ::testing::AllOf;
using testing::Architecture;
using testing::architectures;
using testing::cpus;
using ::testing::HasSubstr;
using testing::small;
using testing::torchvision_keys;
using testing::warm_up;
using torch::Tensor;
using torch::nn::Sequential;
using State = std::map<std::string, Tensor>;

/// Random values for torchvision's keys, in the shapes of the model.
State random_state(const Sequential& model, const Architecture& architecture) {
  auto ours = model->named_parameters();
  ours.update(model->named_buffers());
  State state;
  for (const auto& key : torchvision_keys(architecture)) {
    const auto& like = ours[from_torchvision(key)];
    state[key] =
        like.is_floating_point() ? torch::rand(like.sizes()) : torch::randint(1, 100, like.sizes(), like.options());
  }
  return state;
}

bool holds(const torch::nn::Module& model, const State& state) {
  auto ours = model.named_parameters();
  ours.update(model.named_buffers());
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
  LoadTorchvision() : state_(random_state(model_, architectures()[0])) {}
  ~LoadTorchvision() override { std::filesystem::remove(path_); }

  /// Expects loading to fail with a message that contains both texts, and to leave the model unchanged.
  template <typename Error, typename Source>
  void refuses(const Source& source, const std::string& text, const std::string& other = "") {
    const auto before = model_->parameters().front().clone();
    EXPECT_THAT([&] { load_torchvision(*model_, source); },
                ::testing::ThrowsMessage<Error>(AllOf(HasSubstr(text), HasSubstr(other))));
    EXPECT_TRUE(torch::equal(model_->parameters().front(), before));
  }

  Sequential model_ = resnet18(small());
  State state_;
  const std::filesystem::path path_ =
      std::filesystem::path(::testing::TempDir()) /
      (std::string("resnet_") + ::testing::UnitTest::GetInstance()->current_test_info()->name() + ".safetensors");
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
  warm_up(model_, {2, 3, 8, 8});
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
  write_safetensors(path_, {.tensors = state_, .training = ""});
  load_torchvision(*model_, path_);
  EXPECT_TRUE(holds(*model_, state_));
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 1);
  refuses<std::runtime_error>(path_, "cannot read '" + path_.string() + "': ");
}

}  // namespace
}  // namespace gpipe::models
