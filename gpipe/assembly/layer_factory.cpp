#include "gpipe/layer_factory.h"

#include <c10/util/Exception.h>

#include "absl/container/flat_hash_set.h"
#include "gpipe/autograd/random_scope.h"
#include "gpipe/base/checks.h"

namespace gpipe {

void LayerFactory::set_name(std::string name) {
  if (name.empty() || name.find('.') != name.npos) {
    refuse_argument("a layer's name must not be empty or have a dot, but is '", name, "'");
  }
  name_ = std::move(name);
}

std::unique_ptr<Layer> LayerFactory::operator()() const {
  try {
    auto layer = make_(name_);
    if (!layer) refuse_argument("the factory of layer '", name_, "' returned no module");
    return layer;
  } catch (c10::Error& error) {
    error.add_context("in the factory of layer '" + name_ + "'");
    throw;
  }
}

LayerFactories factories_of(std::vector<std::unique_ptr<Layer>> layers) {
  LayerFactories factories;
  for (auto& layer : layers) {
    auto name = layer->name();
    auto held = std::make_shared<std::unique_ptr<Layer>>(std::move(layer));  // because a std::function is copyable
    factories.emplace_back([held = std::move(held)] { return std::move(*held); });
    factories.back().name_ = std::move(name);
  }
  return factories;
}

LayerFactories independent(LayerFactories factories) {
  const auto seed = std::make_shared<std::optional<std::uint64_t>>();
  absl::flat_hash_set<std::string> names;
  for (std::size_t i = 0; i < factories.size(); ++i) {
    auto& [name, make] = factories[i];
    if (name.empty()) name = std::to_string(i);
    if (!names.insert(name).second) refuse_argument("two layers have the name '", name, "'; each needs its own");
    make = [make = std::move(make), seed, index = static_cast<std::int64_t>(i)](const std::string& layer) {
      if (!*seed) *seed = RandomScope::draw_seed();
      const RandomScope scope(**seed, index, /*micro_batch=*/0);
      return make(layer);
    };
  }
  return factories;
}

}  // namespace gpipe
