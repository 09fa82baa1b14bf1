#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "models/resnet.h"

namespace gpipe::models::testing {

using torch::nn::Sequential;

struct Architecture {
  std::string name;
  Sequential (*make)(const ResNetOptions&);
  std::vector<int> blocks;
  int convolutions;
  std::int64_t parameters;
};

inline const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> all{
      {"resnet18", resnet18, {2, 2, 2, 2}, 2, 11'689'512},    {"resnet34", resnet34, {3, 4, 6, 3}, 2, 21'797'672},
      {"resnet50", resnet50, {3, 4, 6, 3}, 3, 25'557'032},    {"resnet101", resnet101, {3, 4, 23, 3}, 3, 44'549'160},
      {"resnet152", resnet152, {3, 8, 36, 3}, 3, 60'192'808},
  };
  return all;
}

inline ResNetOptions small() { return ResNetOptions().small_images(true).num_classes(10); }

/// The keys of the state of torchvision's model, from its documented structure.
inline std::vector<std::string> torchvision_keys(const Architecture& architecture) {
  std::vector<std::string> keys{"conv1.weight", "fc.weight", "fc.bias"};
  const auto norm = [&keys](const std::string& prefix) {
    for (const auto* leaf : {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}) {
      keys.push_back(prefix + "." + leaf);
    }
  };
  norm("bn1");
  for (int g = 1; g <= 4; ++g) {
    for (int b = 0; b < architecture.blocks[g - 1]; ++b) {
      const auto block = "layer" + std::to_string(g) + "." + std::to_string(b) + ".";
      for (int j = 1; j <= architecture.convolutions; ++j) {
        keys.push_back(block + "conv" + std::to_string(j) + ".weight");
        norm(block + "bn" + std::to_string(j));
      }
      if (b == 0 && (g > 1 || architecture.convolutions == 3)) {
        keys.push_back(block + "downsample.0.weight");
        norm(block + "downsample.1");
      }
    }
  }
  return keys;
}

inline std::vector<torch::Device> cpus(std::size_t count) { return std::vector<torch::Device>(count, torch::kCPU); }

/// Runs two forwards, so that the batch norms have other statistics than those of a new model.
inline void warm_up(Sequential& model, const std::vector<std::int64_t>& shape) {
  const torch::NoGradGuard no_grad;
  model->train();
  for (int i = 0; i < 2; ++i) model->forward(torch::randn(shape, model->parameters().front().options()));
  model->eval();
}

}  // namespace gpipe::models::testing
