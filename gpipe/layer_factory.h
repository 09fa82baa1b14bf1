#pragma once

#include <torch/nn/modules/container/any.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "gpipe/api.h"
#include "gpipe/layer.h"

namespace gpipe {

class GPIPE_API LayerFactory;
/// A model as the factories of its layers, in order.
using LayerFactories = std::vector<LayerFactory>;

/// Makes one layer of a model, which can then be larger than any rank: GPipe calls the factories in order, and drops
/// each layer of another rank before it calls the next one.
///
///   gpipe::LayerFactories model{{"conv", [] { return torch::nn::Conv2d(1, 8, 3); }},
///                               {"relu", [] { return torch::nn::ReLU(); }}};
///   auto pipe = gpipe::GPipe(model, {1, 1}, gpipe::GPipeOptions().ranks(ranks));
///
/// Layers that share a parameter get it from a variable that their factories capture.
class GPIPE_API LayerFactory {
 public:
  /// `make` returns a module as a Sequential takes it: a holder, a std::shared_ptr, a torch::nn::AnyModule; or a
  /// std::unique_ptr<Layer>. Errors: std::invalid_argument for a name that is empty or has a dot.
  template <typename Make>
  LayerFactory(std::string name, Make make) : LayerFactory(std::move(make)) {
    set_name(std::move(name));
  }
  /// The layer's name is its index, as in a Sequential.
  template <std::invocable Make>
  LayerFactory(Make make)
      : make_([make = std::move(make)](const std::string& name) mutable { return wrap(name, make()); }) {}

  /// Empty if none was given: then the layer's name is its index.
  const std::string& name() const { return name_; }

  /// Returns a new layer. Errors: std::invalid_argument for no module; what `make` throws, a c10::Error with the name.
  std::unique_ptr<Layer> operator()() const;

 private:
  friend GPIPE_API LayerFactories factories_of(std::vector<std::unique_ptr<Layer>> layers);
  friend GPIPE_API LayerFactories independent(LayerFactories factories);

  void set_name(std::string name);

  template <typename Module>
  static std::unique_ptr<Layer> wrap(const std::string& name, Module module) {
    if constexpr (std::is_same_v<Module, std::unique_ptr<Layer>>) {
      return module;
    } else {
      if constexpr (requires { module.is_empty(); }) {
        if (module.is_empty()) return nullptr;
      } else {
        if (module == nullptr) return nullptr;
      }
      return make_layer(name, torch::nn::AnyModule(std::move(module)));
    }
  }

  std::string name_;
  std::function<std::unique_ptr<Layer>(const std::string& name)> make_;
};

/// Returns factories that hand out these layers, each once.
GPIPE_API LayerFactories factories_of(std::vector<std::unique_ptr<Layer>> layers);

/// Lets each layer draw its initial values in a RandomScope of its own, all from one draw from the default generator.
/// Names layers without a name by their indices. Errors: std::invalid_argument for two layers of one name.
GPIPE_API LayerFactories independent(LayerFactories factories);

}  // namespace gpipe
