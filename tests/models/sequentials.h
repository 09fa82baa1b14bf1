#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gpipe::models::testing {

inline std::int64_t parameter_count(const torch::nn::Sequential& model) {
  std::int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  return count;
}

inline std::vector<std::string> layer_names(const torch::nn::Sequential& model) {
  std::vector<std::string> names;
  for (const auto& child : model->named_children()) names.push_back(child.key());
  return names;
}

}  // namespace gpipe::models::testing
