#include "models/unet.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/pooling.h>

#include <string>
#include <utility>

#include "gpipe/base/checks.h"
#include "skip/skippable.h"

namespace gpipe::models {
namespace {

namespace nn = torch::nn;

/// One end of a skip. The stashing end returns its input; the popping end crops it to the skip and concatenates both.
class SkipEndImpl : public nn::Cloneable<SkipEndImpl>, public Skippable {
 public:
  SkipEndImpl(const std::string& type, Names names, Namespace ns) : Cloneable(type), Skippable(std::move(names)) {
    isolate(ns);
  }
  void reset() override {}
  torch::Tensor forward(torch::Tensor x) {
    if (stashes().empty()) {
      const auto skip = pop(pops().front().name);
      return torch::cat({skip, x.narrow(2, 0, skip.size(2)).narrow(3, 0, skip.size(3))}, 1);
    }
    stash(stashes().front().name, x);
    return x;
  }
};
TORCH_MODULE(SkipEnd);

class UNetBuilder {
 public:
  explicit UNetBuilder(const UNetOptions& options) : options_(options) {}

  nn::Sequential build() {
    std::int64_t channels = options_.in_channels();
    for (std::int64_t level = 1; level <= options_.depth(); ++level) {
      const auto name = "down" + std::to_string(level);
      block(name, channels, channels_at(level));
      channels = channels_at(level);
      add(name + "_stash", SkipEnd("gpipe::models::Stash", Skippable::Names{.stash = {skip_at(level)}}, skips_));
      // Rounding up keeps at least one pixel. Doubling then gives at least the size of the skip.
      add(name + "_pool", nn::MaxPool2d(nn::MaxPool2dOptions(2).ceil_mode(true)));
    }
    block("bottom", channels, 2 * channels);
    for (std::int64_t level = options_.depth(); level >= 1; --level) {
      const auto name = "up" + std::to_string(level);
      channels = channels_at(level);
      add(name + "_upsample", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(2 * channels, channels, 2).stride(2)));
      add(name + "_join", SkipEnd("gpipe::models::Join", Skippable::Names{.pop = {skip_at(level)}}, skips_));
      block(name, 2 * channels, channels);
    }
    add("head", conv(channels, options_.out_channels(), 1));
    return model_;
  }

 private:
  static nn::Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t kernel, bool bias = true) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).padding(kernel / 2).bias(bias));
  }

  static std::string skip_at(std::int64_t level) { return "level" + std::to_string(level); }

  std::int64_t channels_at(std::int64_t level) const { return options_.base_channels() << (level - 1); }

  template <typename Layer>
  void add(std::string name, const Layer& layer) {
    model_->push_back(std::move(name), layer);
  }

  void block(const std::string& name, std::int64_t in, std::int64_t out) {
    for (const std::string number : {"1", "2"}) {
      // No bias, because batch norm subtracts it with the mean.
      add(name + "_conv" + number, conv(std::exchange(in, out), out, 3, /*bias=*/false));
      add(name + "_norm" + number, nn::BatchNorm2d(out));
      // In place is safe: batch norm's backward does not need the output, and the output is never stashed.
      add(name + "_relu" + number, nn::ReLU(nn::ReLUOptions(/*inplace=*/true)));
    }
    if (options_.dropout() > 0) add(name + "_dropout", nn::Dropout2d(options_.dropout()));
  }

  const UNetOptions& options_;
  const Namespace skips_;
  nn::Sequential model_;
};

}  // namespace

nn::Sequential unet(const UNetOptions& options) {
  const auto require_positive = [](const char* option, std::int64_t value) {
    if (value < 1) refuse_argument("unet: ", option, " is ", value, ", but must be at least 1");
  };
  require_positive("in_channels", options.in_channels());
  require_positive("out_channels", options.out_channels());
  require_positive("base_channels", options.base_channels());
  const auto [depth, dropout] = std::pair(options.depth(), options.dropout());
  if (depth < 1 || depth > 16) refuse_argument("unet: depth is ", depth, ", but must be from 1 to 16");
  if (!(dropout >= 0 && dropout < 1)) {
    refuse_argument("unet: dropout is ", dropout, ", but must be at least 0 and below 1");
  }
  return UNetBuilder(options).build();
}

}  // namespace gpipe::models
