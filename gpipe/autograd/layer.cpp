#include "gpipe/autograd/layer.h"

#include <c10/util/Type.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <optional>

#include "gpipe/base/checks.h"
#include "gpipe/graph/graph_layer.h"

namespace gpipe {
namespace {

using torch::nn::AnyModule;
using torch::nn::AnyValue;

template <std::size_t>
using TensorAt = at::Tensor;

// Calls f with the std::index_sequence of each size of a tuple, 2 to 8, until it returns true.
template <typename F>
void try_tuple_sizes(F f) {
  [&]<std::size_t... I>(std::index_sequence<I...>) { (f(std::make_index_sequence<I + 2>()) || ...); }
  (std::make_index_sequence<7>());
}

AnyValue to_any(Value value) {
  std::optional<AnyValue> any;
  switch (value.form().kind) {
    case Value::Form::kTensor:
      return AnyValue(value.tensor());
    case Value::Form::kVector:
      return AnyValue(std::move(value).tensors());
    case Value::Form::kTuple:
      try_tuple_sizes([&]<std::size_t... I>(std::index_sequence<I...>) {
        if (value.tensors().size() != sizeof...(I)) return false;
        any.emplace(std::tuple<TensorAt<I>...>(value.tensors()[I]...));
        return true;
      });
      break;
    case Value::Form::kObject:
      break;
  }
  if (!any) refuse_argument("a layer cannot take ", value.describe());
  return *std::move(any);
}

std::optional<Value> from_any(AnyValue& any) {
  if (auto* value = any.try_get<Value>()) return std::move(*value);
  if (auto* tensor = any.try_get<at::Tensor>()) return Value(std::move(*tensor));
  if (auto* tensors = any.try_get<std::vector<at::Tensor>>()) return Value(std::move(*tensors));
  std::optional<Value> value;
  try_tuple_sizes([&]<std::size_t... I>(std::index_sequence<I...>) {
    if (auto* tuple = any.try_get<std::tuple<TensorAt<I>...>>()) value = Value(std::move(*tuple));
    return value.has_value();
  });
  return value;
}

void check_no_tensors_of_its_own(const torch::nn::Module& model) {
  for (const auto& [what, tensors] : {std::pair("parameter", model.named_parameters(/*recurse=*/false)),
                                      std::pair("buffer", model.named_buffers(/*recurse=*/false))}) {
    if (tensors.is_empty()) continue;
    refuse_argument("the Sequential has a ", what, " of its own, '", tensors.front().key(),
                    "', which belongs to no layer; register it in a layer");
  }
}

class AnyLayer : public Layer {
 public:
  AnyLayer(std::string name, AnyModule module)
      : name_(std::move(name)), module_(std::move(module)), takes_value_(module_.ptr()->as<GraphLayer>() != nullptr) {}

  Value forward(Value input) override {
    AnyValue output = module_.any_forward(takes_value_ ? AnyValue(std::move(input)) : to_any(std::move(input)));
    if (auto value = from_any(output)) return *std::move(value);
    refuse_argument("layer '", name_, "' returned ", c10::demangle(output.type_info().name()),
                    "; return a tensor, a std::vector of tensors or a std::tuple of 2 to 8 tensors");
  }

  const std::string& name() const override { return name_; }
  std::shared_ptr<torch::nn::Module> module() const override { return module_.ptr(); }

 private:
  std::string name_;
  AnyModule module_;
  bool takes_value_;
};

}  // namespace

bool are_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::ranges::equal(a, b, [](const auto& left, const auto& right) { return left.is_same(right); });
}

Layer::Buffers Layer::buffers() const {
  auto tensors = module()->buffers();
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;
  for (const auto& each : module()->modules()) modes.emplace_back(each, each->is_training());
  auto put_back = [this, tensors, modes = std::move(modes)] {
    for (const auto& [each, training] : modes) {
      if (each->is_training() != training) each->train(training);
    }
    if (are_same(module()->buffers(), tensors)) return;
    throw_error("layer '", name(),
                "' replaced a buffer, which cannot be undone for a recompute; write to the buffer in place");
  };
  return {std::move(tensors), std::move(put_back)};
}

std::string registered_name(const std::string& layer) {
  auto name = layer;
  std::replace(name.begin(), name.end(), '.', '/');
  return name;
}

std::unique_ptr<Layer> make_layer(std::string name, AnyModule module) {
  return std::make_unique<AnyLayer>(std::move(name), std::move(module));
}

std::vector<std::unique_ptr<Layer>> make_layers(const torch::nn::SequentialImpl& model) {
  check_no_tensors_of_its_own(model);
  std::vector<std::unique_ptr<Layer>> layers;
  const auto children = model.named_children();
  auto child = children.begin();
  for (const auto& any : model) layers.push_back(make_layer((child++)->key(), any));
  return layers;
}

}  // namespace gpipe
