#include "python/src/errors.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <stdexcept>
#include <string>

#include "absl/strings/str_format.h"
#include "python/src/interpreter.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::F:
      return "forward";
    case Kind::R:
      return "recompute";
    case Kind::B:
      break;
    case Kind::I:
      return "input gradient";
    case Kind::W:
      return "weight gradient";
  }
  return "backward";
}

std::string describe(const ErrorInfo& info) {
  auto text = absl::StrFormat("[gpipe] in the %s of micro-batch %d on stage %d", name_of(info.action.kind),
                              info.action.micro_batch, info.action.stage);
  if (info.layer >= 0) text += absl::StrFormat(", layer '%s'", info.layer_name);
  return text;
}

void add_note(PyObject* error, const ErrorInfo& info) {
  auto result = py::reinterpret_steal<py::object>(PyObject_CallMethod(error, "add_note", "s", describe(info).c_str()));
  if (!result) PyErr_Clear();  // Python 3.10 has no notes
}

/// Sets the Python error for a C++ exception, as pybind11 and PyTorch do at the end of a call. In a backward, PyTorch's
/// engine would turn all exceptions into one type.
void set_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(error);
  } catch (const std::invalid_argument& wrong) {
    py::set_error(PyExc_ValueError, wrong.what());
  } catch (const std::exception& other) {
    py::set_error(PyExc_RuntimeError, other.what());
  }
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

void on_error(const ErrorInfo& info, const std::exception_ptr& error) {
  persist(error);
  const Section section;
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& raised) {
    add_note(raised.value().ptr(), info);
  } catch (python_error& raised) {
    if (raised.value != nullptr) add_note(raised.value, info);
  } catch (const std::exception&) {
    set_error(error);
    py::error_already_set raised;
    add_note(raised.value().ptr(), info);
    throw raised;
  }
}

}  // namespace gpipe::python
