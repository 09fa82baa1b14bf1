#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>  // converts tensors and devices

#include <exception>
#include <memory>
#include <string>
#include <type_traits>

#include "gpipe/action.h"
#include "gpipe/error_info.h"
#include "gpipe/value.h"

// Conversions between Python objects and values, arguments and errors of the library. REQUIRES: the interpreter's lock,
// unless a function says otherwise.

namespace gpipe::python {

/// Builds a Python object from a value. A value that came from a Python object gets that object's structure; a value
/// of several tensors from C++ layers becomes a tuple; an undefined tensor becomes None.
pybind11::object to_python(const Value& value);

/// Takes the tensors and the structure of a Python object (see gpipe/structure.py). Errors: TypeError, as
/// pybind11::error_already_set, for objects that hold anything but tensors and None.
Value to_value(const pybind11::handle& object);

/// Converts the structure of a Python object to bytes and back, for other ranks. Called without the lock. Errors: those
/// of gpipe.structure.encode() and decode(), as pybind11::error_already_set.
std::string encode_structure(const Structure& structure);
std::shared_ptr<const Structure> decode_structure(const std::string& bytes);

/// LanguageBinding::on_error of a pipeline of Python modules. Adds a note to a Python error that says where it was
/// raised. Throws a Python error with that note in place of any other exception. Called on a worker, without the lock.
void on_error(const ErrorInfo& info, const std::exception_ptr& error);

inline bool is_object(PyObject*) { return true; }

/// An argument of a public function, which signatures show as a T. It may be any object, so that checked() can name it
/// in an error.
template <typename T>
class Unchecked : public pybind11::object {
  PYBIND11_OBJECT_DEFAULT(Unchecked, object, is_object)
  using object::object;
};

/// Converts an argument by the functions of gpipe.checks. Errors: their TypeError and ValueError, with `name`.
template <typename T>
T checked(const Unchecked<T>& value, const char* name) {
  const char* check = std::is_same_v<T, bool>     ? "check_flag"
                      : std::is_same_v<T, int>    ? "check_whole"
                      : std::is_same_v<T, double> ? "check_number"
                                                  : "check_text";
  return pybind11::module_::import("gpipe.checks").attr(check)(value, name).template cast<T>();
}

/// Converts the name of a checkpoint mode, or a number of micro-batches in flight. Errors: TypeError, as
/// pybind11::error_already_set, for another type; std::invalid_argument for another name or a negative number.
Checkpoint to_checkpoint(const pybind11::handle& mode);
pybind11::object to_python(Checkpoint checkpoint);

/// Converts a mode, or a list of one per stage. Errors: as to_checkpoint().
Checkpoints to_checkpoints(const pybind11::handle& modes);

}  // namespace gpipe::python

template <>
struct pybind11::detail::type_caster<gpipe::Value> {
  PYBIND11_TYPE_CASTER(gpipe::Value, handle_type_name<object>::name);
  bool load(handle object, bool) {
    value = gpipe::python::to_value(object);
    return true;
  }
  static handle cast(const gpipe::Value& value, return_value_policy, handle) {
    return gpipe::python::to_python(value).release();
  }
};

template <>
struct pybind11::detail::type_caster<gpipe::Checkpoint> {
  PYBIND11_TYPE_CASTER(gpipe::Checkpoint, const_name("str | int"));
  bool load(handle mode, bool) {
    value = gpipe::python::to_checkpoint(mode);
    return true;
  }
  static handle cast(gpipe::Checkpoint mode, return_value_policy, handle) {
    return gpipe::python::to_python(mode).release();
  }
};

template <>
struct pybind11::detail::type_caster<gpipe::Checkpoints> {
  PYBIND11_TYPE_CASTER(gpipe::Checkpoints, const_name("str | int | collections.abc.Sequence[str | int]"));
  bool load(handle modes, bool) {
    value = gpipe::python::to_checkpoints(modes);
    return true;
  }
  static handle cast(const gpipe::Checkpoints& checkpoints, return_value_policy, handle) {
    const auto& modes = checkpoints.modes;
    if (modes.size() == 1) return gpipe::python::to_python(modes.front()).release();
    list of_stages;
    for (const auto mode : modes) of_stages.append(gpipe::python::to_python(mode));
    return of_stages.release();
  }
};

template <typename T>
struct pybind11::detail::handle_type_name<gpipe::python::Unchecked<T>> {
  static constexpr auto name = make_caster<T>::name;
};
