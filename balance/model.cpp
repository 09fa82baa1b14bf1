#include "balance/model.h"

#include <string>
#include <utility>

namespace gpipe {

Model::Model(const torch::nn::Sequential& model) : Model([model] { return make_layers(*model); }) {}

Model::Model(const NestedSequential& model) : Model([model] { return make_layers(*model); }) {}

Model::Model(MakeLayers make) : make_(std::move(make)), module_(std::make_shared<torch::nn::Module>()) {
  for (const auto& layer : make_()) {
    module_->register_module(std::to_string(named_.size()), layer->module());
    named_.push_back({layer->name(), layer->module()});
  }
}

}  // namespace gpipe
