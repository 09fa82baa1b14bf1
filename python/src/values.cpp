#include "python/src/values.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstddef>
#include <utility>
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
  if (THPVariable_CheckExact(object.ptr())) return Value(THPVariable_Unpack(object.ptr()));
  bool is_plain = PyTuple_CheckExact(object.ptr());
  std::vector<at::Tensor> tensors;
  const auto add = [&](const py::handle& tensor) { tensors.push_back(THPVariable_Unpack(tensor.ptr())); };
  for (Py_ssize_t i = 0; is_plain && i < PyTuple_GET_SIZE(object.ptr()); ++i) {
    const py::handle item = PyTuple_GET_ITEM(object.ptr(), i);
    is_plain = THPVariable_CheckExact(item.ptr());
    if (is_plain) add(item);
  }
  if (is_plain) return Value(std::move(tensors));
  tensors.clear();
  const py::tuple parts = py::module_::import("gpipe.structure").attr("take_apart")(object);
  for (const auto& tensor : parts[0]) add(tensor);
  const std::shared_ptr<const Structure> structure = std::make_shared<PythonStructure>(parts[1]);
  return {structure, std::move(tensors)};
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
    if (raised.value != nullptr) add_note(raised.value, info);
  } catch (const std::exception&) {
    // As at the end of a call. In a backward, PyTorch's engine would turn all exceptions into one type.
    py::detail::try_translate_exceptions();
    py::error_already_set raised;
    add_note(raised.value(), info);
    throw raised;
  }
}

}  // namespace gpipe::python
