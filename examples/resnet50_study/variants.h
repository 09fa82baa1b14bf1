#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gpipe::examples::study {

struct Experiment {
  std::vector<torch::Device> devices;  ///< two
  std::int64_t batch_size = 120;
  std::int64_t image = 128;
  std::vector<std::int64_t> splits = {1, 3, 5, 8, 10, 12, 20, 40, 60};
  int predictions = 3;          ///< per variant; the median is used
  double profile_seconds = 10;  ///< approximate time per prediction
};

/// A way to train a ResNet-50.
struct Variant {
  std::string name;        ///< "single", "model parallel", "pipeline", "data parallel"
  std::int64_t split = 0;  ///< pipeline only: samples per micro-batch
  double predicted = 0;    ///< seconds per step: forward and backward
  /// Trains on one mini-batch.
  std::function<void(const torch::Tensor& input, const torch::Tensor& target)> step;
};

constexpr std::int64_t kClasses = 1000;

/// Makes all variants, with equal weights, SGD and mean squared error. Calls `tell` before each profile with what is
/// measured.
std::vector<Variant> make_variants(const Experiment& experiment, const std::function<void(const std::string&)>& tell);

}  // namespace gpipe::examples::study
