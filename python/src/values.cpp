#include "python/src/values.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python/src/interpreter.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// A gpipe.structure.Structure.
class PythonStructure : public Structure {
 public:
  explicit PythonStructure(PyObject* structure) : structure_(reference_to(structure)) {}

  bool equals(const Structure& other) const override {
    const auto* python = dynamic_cast<const PythonStructure*>(&other);
    if (python == nullptr) return false;
    const Section section;
    return py::handle(structure_.get()).equal(py::handle(python->structure_.get()));
  }

  std::string describe() const override {
    const Section section;
    return py::repr(structure_.get()).cast<std::string>();
  }

  /// REQUIRES: the interpreter's lock.
  PyObject* get() const { return structure_.get(); }

  /// Returns a new reference. REQUIRES: the interpreter's lock.
  PyObject* build(const py::list& tensors) const {
    return py::handle(structure_.get()).attr("build")(tensors).release().ptr();
  }

 private:
  Reference structure_;
};

Value take_apart(PyObject* object) {
  const py::tuple parts = py::module_::import("gpipe.structure").attr("take_apart")(py::handle(object));
  std::vector<at::Tensor> tensors;
  for (const auto& tensor : parts[0]) tensors.push_back(THPVariable_Unpack(tensor.ptr()));
  const std::shared_ptr<const Structure> structure = std::make_shared<PythonStructure>(parts[1].ptr());
  return {structure, std::move(tensors)};
}

}  // namespace

PyObject* to_python(const at::Tensor& tensor) {
  if (tensor.defined()) return THPVariable_Wrap(tensor);
  Py_RETURN_NONE;
}

PyObject* to_python(const Value& value) {
  const auto& tensors = value.tensors();
  const auto& form = value.form();
  if (form.kind == Value::Form::kTensor) return to_python(tensors.front());
  if (form.kind == Value::Form::kObject) {
    py::list list;
    for (const auto& tensor : tensors) list.append(py::reinterpret_steal<py::object>(to_python(tensor)));
    return static_cast<const PythonStructure&>(*form.structure).build(list);
  }
  auto tuple = py::reinterpret_steal<py::object>(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!tuple) throw py::error_already_set();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), to_python(tensors[i]));
  }
  return tuple.release().ptr();
}

Value to_value(PyObject* object) {
  if (THPVariable_CheckExact(object)) return Value(THPVariable_Unpack(object));
  if (!PyTuple_CheckExact(object)) return take_apart(object);
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
    PyObject* item = PyTuple_GET_ITEM(object, i);
    if (!THPVariable_CheckExact(item)) return take_apart(object);
    tensors.push_back(THPVariable_Unpack(item));
  }
  return Value(std::move(tensors));
}

std::string encode_structure(const Structure& structure) {
  const Section section;
  const py::handle object = static_cast<const PythonStructure&>(structure).get();
  return py::module_::import("gpipe.structure").attr("encode")(object).cast<py::bytes>();
}

std::shared_ptr<const Structure> decode_structure(const std::string& bytes) {
  const Section section;
  const auto structure = py::module_::import("gpipe.structure").attr("decode")(py::bytes(bytes));
  return std::make_shared<PythonStructure>(structure.ptr());
}

}  // namespace gpipe::python
