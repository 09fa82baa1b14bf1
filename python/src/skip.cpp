#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "python/src/pipeline.h"
#include "python/src/values.h"
#include "skip/context.h"
#include "skip/namespace.h"

namespace gpipe::python {

namespace py = pybind11;

void init_skip(py::module_& module) {
  py::class_<Namespace>(module, "Namespace").def(py::init<>()).def_static("shared", &Namespace::global);
  module.def("stash", [](const Namespace& ns, const std::string& name, const py::object& tensor) {
    SkipContext::current().stash({ns, name}, tensor.is_none() ? at::Tensor() : THPVariable_Unpack(tensor.ptr()));
  });
  module.def("pop", [](const Namespace& ns, const std::string& name) {
    return py::reinterpret_steal<py::object>(to_python(SkipContext::current().pop({ns, name})));
  });
}

}  // namespace gpipe::python
