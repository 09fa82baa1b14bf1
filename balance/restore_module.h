#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

#include "gpipe/autograd/layer.h"

namespace gpipe {

/// Restores a module's state when destroyed: values, memory, version counters, gradients and requires_grad of the
/// parameters and buffers it had at construction; training modes; the CPU's default generator. Parameters and buffers
/// that layers register in between stay.
///
/// The constructor copies all buffers. A parameter is copied only during two forwards of its layer: the first that
/// builds an autograd graph and the first that does not. The copy is kept if that forward changed the parameter.
///
/// Thread safety: watched layers may run on several threads at once, but each layer and parameter on one at a time.
class RestoreModule {
 public:
  /// REQUIRES: a std::shared_ptr holds the module.
  explicit RestoreModule(const torch::nn::Module& module);
  /// Does not throw. Skips what cannot be restored, e.g. after a device failure.
  ~RestoreModule();
  RestoreModule(const RestoreModule&) = delete;
  RestoreModule& operator=(const RestoreModule&) = delete;

  /// Wraps the module's layers so that their forwards are watched. Each call must get the same layers in the same
  /// order.
  std::vector<std::unique_ptr<Layer>> watch(std::vector<std::unique_ptr<Layer>> layers) const;

  /// Errors: std::runtime_error if a parameter's version counter shows a change outside those first forwards, which
  /// cannot be undone.
  void check() const;

 private:
  class WatchedLayer;
  class Copies;
  struct Saved;
  struct State;

  const std::shared_ptr<State> state_;
  at::Tensor generator_state_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;  // parents before children
};

}  // namespace gpipe
