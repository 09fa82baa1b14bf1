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
  int predictions = 3;          ///< made of each variant, of which the middle one counts
  double profile_seconds = 10;  ///< for each of them, about
};

/// A way to train a ResNet-50 with one mini-batch a step.
struct Variant {
  std::string name;        ///< "single", "model parallel", "pipeline", "data parallel"
  std::int64_t split = 0;  ///< of a pipeline: samples of a micro-batch
  double predicted = 0;    ///< seconds of a step's forward and backward
  std::function<void(const torch::Tensor& input, const torch::Tensor& target)> step;
};

constexpr std::int64_t kClasses = 1000;

/// All of them, with equal weights, SGD and the mean squared error. `tell` is told what is being measured for the
/// predictions.
std::vector<Variant> make_variants(const Experiment& experiment, const std::function<void(const std::string&)>& tell);

}  // namespace gpipe::examples::study
