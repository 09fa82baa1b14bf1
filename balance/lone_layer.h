#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>

#include "balance/layer_decorator.h"
#include "skip/context.h"

namespace gpipe {

/// Skips between their stash and their pop.
using Skips = std::map<SkipKey, at::Tensor>;

/// Runs one layer as a model of its own. It pops copies of the entering skips, whose gradients are discarded. Its
/// stashed tensors receive a gradient of ones in the backward.
class LoneLayer : public LayerDecorator {
 public:
  /// Pops from `entering`, and stashes to `leaving` unless that is null. Both must outlive it.
  LoneLayer(std::unique_ptr<Layer> layer, const Skips& entering, Skips* leaving);

  Value forward(Value input) override;
  /// Has the layer's parameters, buffers and training mode, but declares no skips.
  std::shared_ptr<torch::nn::Module> module() const override { return shell_; }

 private:
  const Skips& entering_;
  Skips* const leaving_;
  const std::shared_ptr<torch::nn::Module> shell_;
};

}  // namespace gpipe
