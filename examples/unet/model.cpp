#include "examples/unet/model.h"

#include <CLI/CLI.hpp>
#include <stdexcept>

#include "examples/common/flags.h"
#include "examples/unet/classes.h"
#include "examples/unet/segmentation.h"
#include "models/unet.h"

namespace gpipe::examples::unet {
namespace {

constexpr int kMaxDepth = 16;
constexpr int kMaxChannels = 4096;

std::uint64_t number(const std::map<std::string, std::string>& flags, const std::string& flag, std::uint64_t low,
                     std::uint64_t high) {
  const auto found = flags.find(flag);
  if (found == flags.end()) throw std::invalid_argument("it does not store " + flag);
  const auto value = to_whole_number(found->second);
  if (!value || *value < low || *value > high) throw std::invalid_argument("its " + flag + " is " + found->second);
  return *value;
}

}  // namespace

void add_model_options(CLI::App& app, ModelOptions& options) {
  app.add_option("-c,--classes", options.classes,
                 "number of classes, with the background; masks of more than two are coloured")
      ->transform(whole_number(2, kMaxClasses));
  app.add_option("--depth", options.depth, "how often the U-Net halves the resolution")
      ->transform(whole_number(1, kMaxDepth));
  app.add_option("--channels", options.channels, "channels of the U-Net at full resolution")
      ->transform(whole_number(1, kMaxChannels));
  app.add_flag("--bilinear", options.bilinear, "upsample by interpolation instead of transposed convolutions");
}

std::map<std::string, std::string> to_flags(const ModelOptions& options) {
  return {{"--classes", std::to_string(options.classes)},
          {"--depth", std::to_string(options.depth)},
          {"--channels", std::to_string(options.channels)},
          {"--bilinear", std::to_string(options.bilinear)}};
}

ModelOptions from_flags(const std::map<std::string, std::string>& flags) {
  ModelOptions options;
  options.classes = static_cast<int>(number(flags, "--classes", 2, kMaxClasses));
  options.depth = static_cast<std::int64_t>(number(flags, "--depth", 1, kMaxDepth));
  options.channels = static_cast<std::int64_t>(number(flags, "--channels", 1, kMaxChannels));
  options.bilinear = number(flags, "--bilinear", 0, 1) != 0;
  return options;
}

torch::nn::Sequential make_model(const ModelOptions& options) {
  return models::unet(
      models::UNetOptions()
          .out_channels(output_channels(options.classes))
          .depth(options.depth)
          .base_channels(options.channels)
          .upsampling(options.bilinear ? models::Upsampling::kLinear : models::Upsampling::kTransposed));
}

}  // namespace gpipe::examples::unet
