#include "models/resnet.h"

#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/pooling.h>

#include <array>
#include <optional>
#include <utility>

#include "gpipe/base/checks.h"
#include "skip/skippable.h"

namespace gpipe::models {
namespace {

namespace nn = torch::nn;

nn::Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride = 1) {
  // No bias, because batch norm subtracts it with the mean.
  nn::Conv2d layer(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
  nn::init::kaiming_normal_(layer->weight, /*a=*/0, torch::kFanOut, torch::kReLU);
  return layer;
}

/// Converts a block's input to the shape of its output, if they differ.
struct Projection {
  std::int64_t in;
  std::int64_t out;
  std::int64_t stride;

  nn::Sequential make() const { return nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out)); }
};

/// One end of a shortcut, with its projection, if any. The stashing end returns its input; the other adds the skip.
class ShortcutImpl : public nn::Cloneable<ShortcutImpl>, public Skippable {
 public:
  ShortcutImpl(const std::string& type, Names names, Namespace ns, std::optional<Projection> projection)
      : Cloneable(type), Skippable(std::move(names)), projection_(projection) {
    isolate(ns);
    reset();
  }
  void reset() override {
    if (projection_) downsample_ = register_module("downsample", projection_->make());
  }
  torch::Tensor forward(torch::Tensor x) {
    // Adding in place to x is safe, because batch norm's backward does not need its output. Adding in place to the skip
    // is not: it is the block's input, which the backward of the first convolution needs.
    if (stashes().empty()) return x.add_(project(pop(pops().front().name)));
    stash(stashes().front().name, project(x));
    return x;
  }

 private:
  torch::Tensor project(const torch::Tensor& x) { return projection_ ? downsample_->forward(x) : x; }

  std::optional<Projection> projection_;
  nn::Sequential downsample_{nullptr};
};
TORCH_MODULE(Shortcut);

enum class Block { kBasic, kBottleneck };

class ResNetBuilder {
 public:
  ResNetBuilder(Block block, const ResNetOptions& options) : block_(block), options_(options) {}

  nn::Sequential build(const std::array<int, 4>& blocks) {
    stem();
    for (int g = 0; g < 4; ++g) {
      for (int b = 0; b < blocks[g]; ++b) {
        const auto prefix = "layer" + std::to_string(g + 1) + "_" + std::to_string(b) + "_";
        block(prefix, kStemChannels << g, /*stride=*/g > 0 && b == 0 ? 2 : 1);
      }
    }
    add("avgpool", nn::AdaptiveAvgPool2d(1));
    add("flatten", nn::Flatten());
    add("fc", nn::Linear(channels_, options_.num_classes()));
    return model_;
  }

 private:
  static constexpr std::int64_t kStemChannels = 64;

  template <typename Layer>
  void add(std::string name, const Layer& layer) {
    model_->push_back(std::move(name), layer);
  }

  void add_relu(std::string name) {
    // In place is safe: the outputs of batch norms and joins are not stashed, and no backward needs them.
    add(std::move(name), nn::ReLU(nn::ReLUOptions(/*inplace=*/true)));
  }

  void stem() {
    channels_ = kStemChannels;
    const bool small = options_.small_images();
    add("conv1", small ? conv(options_.in_channels(), channels_, 3) : conv(options_.in_channels(), channels_, 7, 2));
    add("bn1", nn::BatchNorm2d(channels_));
    add_relu("relu");
    if (!small) add("maxpool", nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  }

  void block(const std::string& prefix, std::int64_t width, std::int64_t stride) {
    const auto skip = prefix + "identity";
    const auto in = channels_;
    channels_ = block_ == Block::kBasic ? width : 4 * width;
    std::optional<Projection> before;
    std::optional<Projection> after;
    if (in != channels_ || stride != 1) {
      const bool grows = channels_ > in * stride * stride;
      (grows ? after : before) = Projection{in, channels_, stride};
    }
    add(prefix + "stash", Shortcut("gpipe::models::Stash", Skippable::Names{.stash = {skip}}, skips_, before));
    if (block_ == Block::kBasic) {
      convolution(prefix, 1, conv(in, width, 3, stride));
      convolution(prefix, 2, conv(width, width, 3));
    } else {
      convolution(prefix, 1, conv(in, width, 1));
      convolution(prefix, 2, conv(width, width, 3, stride));
      convolution(prefix, 3, conv(width, channels_, 1));
    }
    add(prefix + "join", Shortcut("gpipe::models::Join", Skippable::Names{.pop = {skip}}, skips_, after));
    add_relu(prefix + "relu" + std::to_string(convolutions()));
  }

  int convolutions() const { return block_ == Block::kBasic ? 2 : 3; }

  void convolution(const std::string& prefix, int j, const nn::Conv2d& layer) {
    const auto number = std::to_string(j);
    add(prefix + "conv" + number, layer);
    add(prefix + "bn" + number, nn::BatchNorm2d(layer->options.out_channels()));
    if (j < convolutions()) add_relu(prefix + "relu" + number);
  }

  const Block block_;
  const ResNetOptions& options_;
  const Namespace skips_;
  nn::Sequential model_;
  std::int64_t channels_ = 0;
};

nn::Sequential resnet(Block block, const std::array<int, 4>& blocks, const ResNetOptions& options) {
  const auto require_positive = [](const char* option, std::int64_t value) {
    if (value < 1) refuse_argument("resnet: ", option, " is ", value, ", but must be at least 1");
  };
  require_positive("num_classes", options.num_classes());
  require_positive("in_channels", options.in_channels());
  return ResNetBuilder(block, options).build(blocks);
}

}  // namespace

nn::Sequential resnet18(const ResNetOptions& options) { return resnet(Block::kBasic, {2, 2, 2, 2}, options); }
nn::Sequential resnet50(const ResNetOptions& options) { return resnet(Block::kBottleneck, {3, 4, 6, 3}, options); }

}  // namespace gpipe::models
