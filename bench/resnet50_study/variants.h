#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/ranks.h"

namespace gpipe::study {

/// The four processes that torchrun has started; all null if there is only this one.
struct Processes {
  std::shared_ptr<Ranks> all;
  std::shared_ptr<Ranks> two;   ///< the first two, as replicas of one stage; null in the others
  std::shared_ptr<Ranks> four;  ///< all, as two replicas of two stages
};

/// Whether this process writes and prints.
inline bool is_first(const std::shared_ptr<Ranks>& all) { return !all || all->rank() == 0; }

struct Experiment {
  std::vector<torch::Device> devices;  ///< two
  Processes processes;
  std::int64_t batch_size = 120;
  std::int64_t image = 128;
  std::vector<std::int64_t> splits = {1, 3, 5, 8, 10, 12, 20, 40, 60};
  int predictions = 3;          ///< per variant; the median is used
  double profile_seconds = 10;  ///< approximate time per prediction
};

/// A way to train a ResNet-50.
struct Variant {
  std::string name;        ///< e.g. "model parallel"
  std::int64_t split = 0;  ///< pipelines only: samples per micro-batch
  double predicted = 0;    ///< seconds per step: forward and backward; only in the first process
  /// Trains on one mini-batch. If the variant runs over processes, all of these call it.
  std::function<void(const torch::Tensor& input, const torch::Tensor& target)> step;
};

constexpr std::int64_t kClasses = 1000;

/// Makes the variants that this process takes part in, with equal weights, SGD and mean squared error. The first
/// process takes part in all. Calls `tell` before each profile with what is measured.
std::vector<Variant> make_variants(const Experiment& experiment, const std::function<void(const std::string&)>& tell);

}  // namespace gpipe::study
