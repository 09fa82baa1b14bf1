#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "python/src/pipeline.h"
#include "python/src/values.h"
#include "skip/context.h"
#include "skip/layout.h"
#include "skip/namespace.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// Each declaration is a tuple (index of the layer, path of the module, stashes, pops). Errors: those of match_skips().
void check_skips(const Objects& declarations) {
  std::vector<SkipDeclaration> declared;
  for (const auto& each : declarations) {
    const auto fields = each.cast<py::tuple>();
    declared.push_back({fields[0].cast<int>(), fields[1].cast<std::string>(), to_keys(fields[2]), to_keys(fields[3])});
  }
  match_skips(declared);
}

}  // namespace

void init_skip(py::module_& module) {
  py::class_<Namespace>(module, "Namespace").def(py::init<>()).def_static("shared", &Namespace::global);
  module.def("stash", [](const Namespace& ns, const std::string& name, const py::object& tensor) {
    SkipContext::current().stash({ns, name}, tensor.is_none() ? at::Tensor() : THPVariable_Unpack(tensor.ptr()));
  });
  module.def("pop", [](const Namespace& ns, const std::string& name) {
    return py::reinterpret_steal<py::object>(to_python(SkipContext::current().pop({ns, name})));
  });
  module.def("check_skips", &check_skips, py::arg("declarations"));
}

}  // namespace gpipe::python
