#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <CLI/App.hpp>
#include <cstdint>
#include <map>
#include <string>

namespace gpipe::examples::unet {

/// Which U-Net to train: a snapshot has these among its options, so that a program that uses it needs no flags.
struct ModelOptions {
  int classes = 2;
  std::int64_t depth = 3;
  std::int64_t channels = 8;  ///< at full resolution
  bool bilinear = false;
};

/// A flag for each.
void add_model_options(CLI::App& app, ModelOptions& options);

/// By flag.
std::map<std::string, std::string> to_flags(const ModelOptions& options);
/// The opposite. Throws std::invalid_argument that names a flag that is missing or has no such value.
ModelOptions from_flags(const std::map<std::string, std::string>& flags);

torch::nn::Sequential make_model(const ModelOptions& options);

}  // namespace gpipe::examples::unet
