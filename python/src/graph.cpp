#include "gpipe/graph/graph.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/src/interpreter.h"
#include "python/src/pipeline.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

c10::IValue to_ivalue(const py::handle& object) {
  if (object.is_none()) return {};
  if (THPVariable_Check(object.ptr())) return THPVariable_Unpack(object.ptr());
  if (py::isinstance<py::bool_>(object)) return object.cast<bool>();
  if (py::isinstance<py::int_>(object)) return object.cast<std::int64_t>();
  if (py::isinstance<py::float_>(object)) return object.cast<double>();
  std::vector<c10::IValue> items;
  for (const auto& item : object.cast<py::sequence>()) items.push_back(to_ivalue(item));
  return c10::ivalue::Tuple::create(std::move(items));
}

Graph::CallPython caller_of(const py::object& function) {
  return [held = reference_to(function.ptr())](const std::string& name, std::vector<c10::IValue> arguments) {
    const Section section;
    py::tuple converted(arguments.size() + 1);
    converted[0] = name;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      converted[i + 1] = torch::jit::toPyObject(std::exchange(arguments[i], {}));
    }
    return to_ivalue(py::handle(held.get())(*converted));
  };
}

std::vector<at::Tensor> or_undefined(std::vector<std::optional<at::Tensor>> tensors) {
  std::vector<at::Tensor> found;
  for (auto& tensor : tensors) found.push_back(std::move(tensor).value_or(at::Tensor()));
  return found;
}

std::vector<at::Tensor> run(const Graph& graph, std::vector<at::Tensor> inputs,
                            std::vector<std::optional<at::Tensor>> tensors, bool training, std::vector<SkipKey> pops,
                            std::vector<SkipKey> peeks, std::vector<SkipKey> stashes) {
  const torch::PyWarningHandler warnings;
  return released([&] {
    const Graph::State state{or_undefined(std::move(tensors)), training, std::move(pops), std::move(peeks),
                             std::move(stashes)};
    return run_graph(graph, std::move(inputs), state);
  });
}

}  // namespace

void init_graph(py::module_& module) {
  module.def("is_plain", &is_plain);
  py::class_<Graph, std::shared_ptr<Graph>>(module, "Graph", "What a layer of a converted model computes.")
      .def(py::init([](const std::string& description, const py::object& call_python) {
        return std::make_shared<Graph>(description, call_python.is_none() ? nullptr : caller_of(call_python));
      }))
      .def("run", &run)
      .def_property_readonly("tensors", &Graph::tensors)
      .def_property_readonly("pops", &Graph::pops)
      .def_property_readonly("peeks", &Graph::peeks)
      .def_property_readonly("stashes", &Graph::stashes)
      .def_property_readonly("python_functions", &Graph::python_functions);
}

}  // namespace gpipe::python
