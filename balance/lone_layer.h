#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>

#include "gpipe/autograd/layer.h"
#include "skip/context.h"

namespace gpipe {

/// Skips on their way from layer to layer.
using Skips = std::map<SkipKey, at::Tensor>;

/// One layer as a model of its own: it pops copies of `skips`, whose gradients nobody gets, and what it stashes gets a
/// gradient of ones beside what it returns.
class LoneLayer : public Layer {
 public:
  /// Pops from `entering` and, unless that is null, stashes to `leaving`; both must outlive it.
  LoneLayer(std::unique_ptr<Layer> layer, const Skips& entering, Skips* leaving);

  Value forward(Value input) override;
  const std::string& name() const override { return layer_->name(); }
  /// Has the layer's parameters and buffers, and its mode, but shows no skips.
  std::shared_ptr<torch::nn::Module> module() const override { return shell_; }
  std::vector<at::Tensor> buffers() const override { return layer_->buffers(); }
  void set_buffers(const std::vector<at::Tensor>& buffers) override { layer_->set_buffers(buffers); }

 private:
  const std::unique_ptr<Layer> layer_;
  const Skips& entering_;
  Skips* const leaving_;
  const std::shared_ptr<torch::nn::Module> shell_;
};

}  // namespace gpipe
