#include "python/src/values.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>
#include <vector>

namespace gpipe::python {
namespace {

[[noreturn]] void refuse(PyObject* object) {
  const auto type = pybind11::repr(reinterpret_cast<PyObject*>(Py_TYPE(object)));
  throw pybind11::type_error("expected Tensor, but got " + type.cast<std::string>());
}

}  // namespace

PyObject* to_python(const at::Tensor& tensor) {
  if (tensor.defined()) return THPVariable_Wrap(tensor);
  Py_RETURN_NONE;
}

PyObject* to_python(const Value& value) {
  const auto& tensors = value.tensors();
  if (value.form() == Value::Form::kTensor) return to_python(tensors.front());
  auto tuple = pybind11::reinterpret_steal<pybind11::object>(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!tuple) throw pybind11::error_already_set();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), to_python(tensors[i]));
  }
  return tuple.release().ptr();
}

Value to_value(PyObject* object) {
  if (THPVariable_Check(object)) return Value(THPVariable_Unpack(object));
  if (!PyTuple_Check(object)) refuse(object);
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
    PyObject* item = PyTuple_GET_ITEM(object, i);
    if (item == Py_None) {
      tensors.emplace_back();
    } else if (THPVariable_Check(item)) {
      tensors.push_back(THPVariable_Unpack(item));
    } else {
      refuse(item);
    }
  }
  return Value(std::move(tensors));
}

}  // namespace gpipe::python
