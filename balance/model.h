#pragma once

#include "gpipe/api.h"
#include "gpipe/layer.h"
#include "gpipe/nested.h"
#include "skip/layout.h"

namespace gpipe {

/// A model to profile. Creates fresh Layer objects on the same modules for each pipeline that runs them.
class GPIPE_API Model {
 public:
  using MakeLayers = std::function<std::vector<std::unique_ptr<Layer>>()>;

  /*implicit*/ Model(const torch::nn::Sequential& model);
  /*implicit*/ Model(const NestedSequential& model);
  explicit Model(MakeLayers make);

  std::vector<std::unique_ptr<Layer>> layers() const { return make_(); }
  const std::vector<NamedLayer>& named_layers() const { return named_; }
  /// A module whose children are the modules of all layers.
  const torch::nn::Module& module() const { return *module_; }

 private:
  MakeLayers make_;
  std::vector<NamedLayer> named_;
  std::shared_ptr<torch::nn::Module> module_;
};

}  // namespace gpipe
