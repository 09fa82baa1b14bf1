#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <CLI/App.hpp>
#include <cstdint>
#include <map>
#include <string>

namespace gpipe::examples::unet {

/// Which U-Net to train. Snapshots store these options, so that programs that use the model need no flags for it.
struct ModelOptions {
  int classes = 2;
  std::int64_t depth = 3;
  std::int64_t channels = 8;  ///< at full resolution
  bool bilinear = false;
};

/// Adds a flag for each option.
void add_model_options(CLI::App& app, ModelOptions& options);

/// Returns the options as flags with their values.
std::map<std::string, std::string> to_flags(const ModelOptions& options);
/// The inverse of to_flags(). Errors: std::invalid_argument for a flag that is missing or has an invalid value.
ModelOptions from_flags(const std::map<std::string, std::string>& flags);

torch::nn::Sequential make_model(const ModelOptions& options);

}  // namespace gpipe::examples::unet
