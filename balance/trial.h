#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gpipe/autograd/stage.h"
#include "gpipe/gpipe.h"

namespace gpipe {

/// Trial runs of a module leave no trace: when this goes, buffers, devices, modes and the default generator are as they
/// were.
class Untouched {
 public:
  /// Of a module that a std::shared_ptr holds.
  explicit Untouched(const torch::nn::Module& module);
  ~Untouched();
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;

 private:
  SavedTensors buffers_;
  at::Tensor generator_state_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;  // a module before those in it
  std::vector<std::pair<at::Tensor, torch::Device>> devices_;
};

/// A step that leaves no gradients and runs no hooks: forward, and backward from ones.
void trial_step(GPipe& pipe, const Value& batch);

/// The first micro-batch of a mini-batch that is cut into those sizes, requiring grad where that does.
Value first_micro_batch(const Value& batch, const std::vector<std::int64_t>& sizes);

/// The middle value; of an even number the upper one; 0 of none.
double median(std::vector<double> values);

}  // namespace gpipe
