#include "models/unet.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/upsampling.h>

#include <tuple>
#include <utility>

#include "gpipe/base/checks.h"
#include "skip/skippable.h"

namespace gpipe::models {
namespace {

namespace nn = torch::nn;

/// LibTorch's layers for images with D spatial dimensions, 2 or 3.
template <int D>
struct Nd {
  template <typename In2, typename In3>
  using Choose = std::conditional_t<D == 2, In2, In3>;

  using Conv = Choose<nn::Conv2d, nn::Conv3d>;
  using ConvTranspose = Choose<nn::ConvTranspose2d, nn::ConvTranspose3d>;
  using BatchNorm = Choose<nn::BatchNorm2d, nn::BatchNorm3d>;
  using MaxPool = Choose<nn::MaxPool2d, nn::MaxPool3d>;
  using Dropout = Choose<nn::Dropout2d, nn::Dropout3d>;
  using Linear = Choose<torch::enumtype::kBilinear, torch::enumtype::kTrilinear>;
};

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
      for (std::int64_t dim = 2; dim < skip.dim(); ++dim) x = x.narrow(dim, 0, skip.size(dim));
      return torch::cat({skip, x}, 1);
    }
    stash(stashes().front().name, x);
    return x;
  }
};
TORCH_MODULE(SkipEnd);

template <int D>
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
      add(name + "_pool", typename Nd<D>::MaxPool(nn::MaxPoolOptions<D>(2).ceil_mode(true)));
    }
    block("bottom", channels, 2 * channels);
    for (std::int64_t level = options_.depth(); level >= 1; --level) {
      const auto name = "up" + std::to_string(level);
      channels = channels_at(level);
      upsample(name, 2 * channels, channels);
      add(name + "_join", SkipEnd("gpipe::models::Join", Skippable::Names{.pop = {skip_at(level)}}, skips_));
      block(name, 2 * channels, channels);
    }
    add("head", conv(channels, options_.out_channels(), 1));
    return model_;
  }

 private:
  static typename Nd<D>::Conv conv(std::int64_t in, std::int64_t out, std::int64_t kernel, bool bias = true) {
    return typename Nd<D>::Conv(nn::ConvOptions<D>(in, out, kernel).padding(kernel / 2).bias(bias));
  }

  static std::string skip_at(std::int64_t level) { return "level" + std::to_string(level); }

  std::int64_t channels_at(std::int64_t level) const { return options_.base_channels() << (level - 1); }

  template <typename Layer>
  void add(std::string name, const Layer& layer) {
    model_->push_back(std::move(name), layer);
  }

  void block(const std::string& name, std::int64_t in, std::int64_t out) {
    for (std::int64_t j = 1; j <= options_.convolutions(); ++j) {
      const auto number = std::to_string(j);
      // No bias, because batch norm subtracts it with the mean.
      add(name + "_conv" + number, conv(j == 1 ? in : out, out, 3, /*bias=*/false));
      add(name + "_norm" + number, typename Nd<D>::BatchNorm(out));
      // In place is safe: batch norm's backward does not need the output, and the output is never stashed.
      add(name + "_relu" + number, nn::ReLU(nn::ReLUOptions(/*inplace=*/true)));
    }
    if (options_.dropout() > 0) add(name + "_dropout", typename Nd<D>::Dropout(options_.dropout()));
  }

  void upsample(const std::string& name, std::int64_t in, std::int64_t out) {
    if (options_.upsampling() == Upsampling::kTransposed) {
      add(name + "_upsample", typename Nd<D>::ConvTranspose(nn::ConvTransposeOptions<D>(in, out, 2).stride(2)));
      return;
    }
    // A 1x1 convolution commutes with interpolation. Done first, it costs a quarter (2D) or an eighth (3D).
    add(name + "_reduce", conv(in, out, 1));
    add(name + "_upsample", nn::Upsample(nn::UpsampleOptions()
                                             .scale_factor(std::vector<double>(D, 2.0))
                                             .mode(typename Nd<D>::Linear{})
                                             .align_corners(false)));
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
  require_positive("convolutions", options.convolutions());
  const auto [depth, dropout, dims] = std::tuple(options.depth(), options.dropout(), options.dims());
  if (depth < 1 || depth > 16) refuse_argument("unet: depth is ", depth, ", but must be from 1 to 16");
  if (!(dropout >= 0 && dropout < 1)) {
    refuse_argument("unet: dropout is ", dropout, ", but must be at least 0 and below 1");
  }
  if (dims != 2 && dims != 3) refuse_argument("unet: dims is ", dims, ", but must be 2 or 3");
  return options.dims() == 2 ? UNetBuilder<2>(options).build() : UNetBuilder<3>(options).build();
}

}  // namespace gpipe::models
