#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "gpipe/autograd/stage.h"
#include "gpipe/gpipe.h"

namespace gpipe {

/// Trial runs of a module leave no trace: when this goes, buffers, devices, modes and the default generator are as they
/// were.
class Untouched {
 public:
  explicit Untouched(std::shared_ptr<torch::nn::Module> module);
  ~Untouched();
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;

 private:
  std::vector<at::Tensor> tensors() const;

  const std::shared_ptr<torch::nn::Module> module_;
  SavedBuffers buffers_;
  const at::Tensor generator_state_;
  std::vector<bool> training_;
  std::vector<torch::Device> devices_;
};

/// A step that leaves no gradients: forward, and backward from ones.
void trial_step(GPipe& pipe, const Value& batch);

}  // namespace gpipe
