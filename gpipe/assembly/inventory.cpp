#include "gpipe/assembly/inventory.h"

#include <c10/core/UndefinedTensorImpl.h>

#include <sstream>

#include "gpipe/base/checks.h"
#include "gpipe/tensors/sample_hash.h"

namespace gpipe {
namespace {

template <typename Tensors>
void add_places(std::vector<TensorPlace>& places, int stage, const std::string& layer, const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    places.push_back({stage, layer, tensor.key(), WeakTensor(tensor.value().getIntrusivePtr())});
  }
}

std::string describe_layer(const Layer& layer) {
  std::ostringstream text;
  text << "'" << layer.name() << "'";
  const auto add = [&](const auto& tensors, bool wants_gradients) {
    for (const auto& tensor : tensors) {
      text << ", " << tensor.key() << " ";
      if (tensor.value().defined()) {
        text << tensor.value().scalar_type();
        tensor.value().is_nested() ? text << "[nested]" : text << tensor.value().sizes();
        if (wants_gradients && !tensor.value().requires_grad()) text << " frozen";
      } else {
        text << "undefined";
      }
    }
  };
  add(layer.module()->named_parameters(), /*wants_gradients=*/true);
  add(layer.module()->named_buffers(), /*wants_gradients=*/false);
  return text.str();
}

}  // namespace

const void* TensorPlace::identity() const {
  const auto* impl = tensor._unsafe_get_target();
  return impl == c10::UndefinedTensorImpl::singleton() ? nullptr : impl;
}

std::vector<TensorPlace> places_of_parameters(const std::vector<Stage>& stages) {
  std::vector<TensorPlace> places;
  for (const auto& stage : stages) {
    for (const auto& layer : stage.layers) {
      add_places(places, stage.index, layer->name(), layer->module()->named_parameters());
    }
  }
  return places;
}

void Inventory::add(int stage, const Layer& layer) {
  const auto module = layer.module();
  const auto& name = layer.name();
  const auto [first, inserted] = names_.emplace(module, name);
  if (!inserted) {
    refuse_argument("layers '" + first->second + "' and '" + name +
                    "' are the same module; use a copy, because each layer belongs to one place");
  }
  for (auto& skip : skip_declarations({name, module}, static_cast<int>(descriptions_.size()))) {
    skips_.push_back(std::move(skip));
  }
  add_places(parameters_, stage, name, module->named_parameters());
  add_places(buffers_, stage, name, module->named_buffers());
  for (const auto& parameter : module->named_parameters()) {
    values_.emplace_back(descriptions_.size(), sample_hash({parameter.value()}));
  }
  descriptions_.push_back(describe_layer(layer));
}

std::vector<std::uint64_t> Inventory::values() const {
  std::map<const void*, int> places;
  for (const auto& parameter : parameters_) ++places[parameter.identity()];
  std::vector<std::uint64_t> values(descriptions_.size(), 1);
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    if (places.at(parameters_[p].identity()) > 1) continue;
    const auto [layer, hash] = values_[p];
    values[layer] = hash == 0 ? 0 : values[layer] * (hash | 1);
  }
  return values;
}

}  // namespace gpipe
