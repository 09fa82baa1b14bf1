#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/nn/modules/container/any.h>

#include <map>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "models/resnet.h"
#include "models/unet.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"
#include "skip/skippable.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// A layer of a C++ model, to be wrapped by a Python module.
class NativeLayer {
 public:
  NativeLayer(std::string name, torch::nn::AnyModule module)
      : name_(std::move(name)), module_(std::move(module)), layer_(gpipe::make_layer(name_, module_)) {}

  py::object forward(const py::object& input) const {
    auto value = to_value(input.ptr());
    const auto output = released([&] { return layer_->forward(std::move(value)); });
    return py::reinterpret_steal<py::object>(to_python(output));
  }

  /// Returns a tuple (name, tensor, whether it is a parameter) for each parameter and buffer.
  std::vector<std::tuple<std::string, py::object, bool>> tensors() const {
    std::vector<std::tuple<std::string, py::object, bool>> result;
    const auto parameter_type = py::module_::import("torch.nn").attr("Parameter");
    for (const auto& item : module_.ptr()->named_parameters()) {
      PyObject* wrapped = THPVariable_Wrap(item.value(), reinterpret_cast<PyTypeObject*>(parameter_type.ptr()));
      result.emplace_back(item.key(), py::reinterpret_steal<py::object>(wrapped), true);
    }
    for (const auto& item : module_.ptr()->named_buffers()) {
      result.emplace_back(item.key(), py::reinterpret_steal<py::object>(to_python(item.value())), false);
    }
    return result;
  }

  /// Returns the skips that the layer stashes and those that it pops.
  std::pair<std::vector<std::pair<Namespace, std::string>>, std::vector<std::pair<Namespace, std::string>>> skips()
      const {
    const auto* skippable = dynamic_cast<const Skippable*>(module_.ptr().get());
    if (skippable == nullptr) return {};
    return {to_names(skippable->stashes()), to_names(skippable->pops())};
  }

  void isolate(Namespace ns, const std::string& name) const { gpipe::isolate(*module_.ptr(), ns, {name}); }
  void train(bool on) const { module_.ptr()->train(on); }
  NativeLayer clone() const { return NativeLayer(name_, module_.clone()); }
  const std::string& name() const { return name_; }
  std::string describe() const {
    std::ostringstream text;
    text << *module_.ptr();
    return text.str();
  }

 private:
  static std::vector<std::pair<Namespace, std::string>> to_names(const std::vector<SkipKey>& keys) {
    std::vector<std::pair<Namespace, std::string>> names;
    for (const auto& key : keys) names.emplace_back(key.ns, key.name);
    return names;
  }

  std::string name_;
  torch::nn::AnyModule module_;
  std::shared_ptr<Layer> layer_;
};

std::vector<NativeLayer> layers_of(const torch::nn::Sequential& model) {
  std::vector<NativeLayer> layers;
  const auto children = model->named_children();
  auto child = children.begin();
  for (const auto& any : *model) layers.emplace_back((child++)->key(), any);
  return layers;
}

std::vector<NativeLayer> unet(std::int64_t in_channels, std::int64_t out_channels, std::int64_t depth,
                              std::int64_t base_channels, std::int64_t convolutions, double dropout, std::int64_t dims,
                              const std::string& upsampling) {
  const std::map<std::string, models::Upsampling> ways = {{"transposed", models::Upsampling::kTransposed},
                                                          {"linear", models::Upsampling::kLinear}};
  const auto way = ways.find(upsampling);
  if (way == ways.end()) {
    throw std::invalid_argument("upsampling must be 'transposed' or 'linear', but is '" + upsampling + "'");
  }
  return layers_of(models::unet(models::UNetOptions()
                                    .in_channels(in_channels)
                                    .out_channels(out_channels)
                                    .depth(depth)
                                    .base_channels(base_channels)
                                    .convolutions(convolutions)
                                    .dropout(dropout)
                                    .dims(dims)
                                    .upsampling(way->second)));
}

std::vector<NativeLayer> resnet(int depth, std::int64_t num_classes, std::int64_t in_channels, bool small_images) {
  const std::map<int, torch::nn::Sequential (*)(const models::ResNetOptions&)> depths = {
      {18, models::resnet18},   {34, models::resnet34},   {50, models::resnet50},
      {101, models::resnet101}, {152, models::resnet152},
  };
  return layers_of(depths.at(depth)(
      models::ResNetOptions().num_classes(num_classes).in_channels(in_channels).small_images(small_images)));
}

}  // namespace

void init_models(py::module_& module) {
  py::class_<NativeLayer>(module, "NativeLayer")
      .def_property_readonly("name", &NativeLayer::name)
      .def("forward", &NativeLayer::forward)
      .def("tensors", &NativeLayer::tensors)
      .def("skips", &NativeLayer::skips)
      .def("isolate", &NativeLayer::isolate)
      .def("train", &NativeLayer::train)
      .def("clone", &NativeLayer::clone)
      .def("describe", &NativeLayer::describe);
  module.def("unet", &unet);
  module.def("resnet", &resnet);
}

}  // namespace gpipe::python
