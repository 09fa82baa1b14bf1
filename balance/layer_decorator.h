#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/autograd/layer.h"

namespace gpipe {

/// Base class of layers that wrap another layer. Derived classes replace forward(); other calls go to the wrapped layer.
class LayerDecorator : public Layer {
 public:
  explicit LayerDecorator(std::unique_ptr<Layer> layer) : layer_(std::move(layer)) {}

  const std::string& name() const override { return layer_->name(); }
  std::shared_ptr<torch::nn::Module> module() const override { return layer_->module(); }
  Buffers buffers() const override { return layer_->buffers(); }

 protected:
  Layer& layer() const { return *layer_; }

 private:
  const std::unique_ptr<Layer> layer_;
};

}  // namespace gpipe
