#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

#include "gpipe/autograd/layer.h"

namespace gpipe {

/// Puts a module back when it goes: the parameters and buffers that the module had, with their values, memory, version
/// counters, gradients and requires_grad; the training modes; the default generator of the CPU. What layers register
/// meanwhile stays.
///
/// Buffers are copied at once. Parameters may be huge, so each is copied for the first forwards of its layer only: the
/// one that builds a graph and the one that does not. The copy stays if the forward has changed the parameter.
///
/// Thread safety: watched layers may run on several threads, each layer and parameter on one at a time.
class RestoreModule {
 public:
  /// REQUIRES: a std::shared_ptr holds the module.
  explicit RestoreModule(const torch::nn::Module& module);
  /// Throws nothing. What a failed device does not take back is left, all else is put back.
  ~RestoreModule();
  RestoreModule(const RestoreModule&) = delete;
  RestoreModule& operator=(const RestoreModule&) = delete;

  /// The module's layers, whose forwards are now watched. Each call takes the same layers, in the same order.
  std::vector<std::unique_ptr<Layer>> watch(std::vector<std::unique_ptr<Layer>> layers) const;

  /// Errors: std::runtime_error when something other than a layer's first forwards has changed a parameter, as its
  /// version counter shows: then it cannot be put back.
  void check() const;

 private:
  class WatchedLayer;
  class Copies;
  struct Saved;
  struct State;

  const std::shared_ptr<State> state_;
  at::Tensor generator_state_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;  // a module before those in it
};

}  // namespace gpipe
