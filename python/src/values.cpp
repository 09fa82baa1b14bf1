#include "python/src/values.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "absl/strings/str_format.h"
#include "python/src/interpreter.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// A gpipe.structure.Structure.
class PythonStructure : public Structure {
 public:
  /// REQUIRES: the interpreter's lock.
  explicit PythonStructure(const py::handle& structure) : structure_(reference_to(structure.ptr())) {}

  bool equals(const Structure& other) const override {
    const auto* python = dynamic_cast<const PythonStructure*>(&other);
    if (python == nullptr) return false;
    const Section section;
    return object().equal(python->object());
  }

  std::string describe() const override {
    const Section section;
    return py::repr(object()).cast<std::string>();
  }

  py::handle object() const { return structure_.get(); }

 private:
  Reference structure_;
};

constexpr std::array kKinds = {"forward", "recompute", "backward", "input gradient", "weight gradient"};

void add_note(const py::handle& error, const ErrorInfo& info) {
  auto text = absl::StrFormat("[gpipe] in the %s of micro-batch %d on stage %d",
                              kKinds.at(static_cast<std::size_t>(info.action.kind)), info.action.micro_batch,
                              info.action.stage);
  if (info.layer >= 0) text += absl::StrFormat(", layer '%s'", info.layer_name);
  if (py::hasattr(error, "add_note")) error.attr("add_note")(text);  // Python 3.10 has no notes
}

/// Moves a Python error that an operator raised from the thread's error state into the exception object. A Section
/// would clear the thread's error state.
void persist(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& raised) {
    const Call call;
    raised.persist();
  } catch (...) {
  }
}

}  // namespace

py::object to_python(const Value& value) {
  const auto& form = value.form();
  if (form.kind == Value::Form::kTensor) return py::cast(value.tensors().front());
  const auto tensors = py::cast(value.tensors());
  if (form.kind != Value::Form::kObject) return py::tuple(tensors);
  return static_cast<const PythonStructure&>(*form.structure).object().attr("build")(tensors);
}

Value to_value(const py::handle& object) {
  const auto is_plain = [](const py::handle& each) { return THPVariable_CheckExact(each.ptr()); };
  const auto unpacked = [](const py::object& list) {
    std::vector<at::Tensor> tensors;
    for (const auto& tensor : list) tensors.push_back(THPVariable_Unpack(tensor.ptr()));
    return tensors;
  };
  if (is_plain(object)) return Value(THPVariable_Unpack(object.ptr()));
  if (PyTuple_CheckExact(object.ptr())) {
    const auto tuple = py::reinterpret_borrow<py::tuple>(object);
    if (std::all_of(tuple.begin(), tuple.end(), is_plain)) return Value(unpacked(tuple));
  }
  const py::tuple parts = py::module_::import("gpipe.structure").attr("take_apart")(object);
  const std::shared_ptr<const Structure> structure = std::make_shared<PythonStructure>(parts[1]);
  return {structure, unpacked(parts[0])};
}

std::string encode_structure(const Structure& structure) {
  const Section section;
  const auto object = static_cast<const PythonStructure&>(structure).object();
  return py::module_::import("gpipe.structure").attr("encode")(object).cast<py::bytes>();
}

std::shared_ptr<const Structure> decode_structure(const std::string& bytes) {
  const Section section;
  return std::make_shared<PythonStructure>(py::module_::import("gpipe.structure").attr("decode")(py::bytes(bytes)));
}

void on_error(const ErrorInfo& info, const std::exception_ptr& error) {
  persist(error);
  const Section section;
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& raised) {
    add_note(raised.value(), info);
  } catch (python_error& raised) {
    if (raised.type == nullptr) return;
    raised.restore();
    try {
      const py::error_already_set exception;  // makes the exception, where C code has only set its type and arguments
      add_note(exception.value(), info);
      Py_XSETREF(raised.type, exception.type().inc_ref().ptr());
      Py_XSETREF(raised.value, exception.value().inc_ref().ptr());
    } catch (const std::runtime_error&) {  // from pybind11, where making the exception raises another: `raised` stays
    }
  } catch (const std::exception&) {
    // As at the end of a call. In a backward, PyTorch's engine would turn all exceptions into one type.
    py::detail::try_translate_exceptions();
    py::error_already_set raised;
    add_note(raised.value(), info);
    throw raised;
  }
}

}  // namespace gpipe::python
