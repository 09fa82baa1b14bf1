#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>  // converts tensors and devices

#include <exception>
#include <memory>
#include <string>

#include "gpipe/error_info.h"
#include "gpipe/tensors/value.h"

// Conversions between Python objects and values and errors of the library. REQUIRES: the interpreter's lock, unless a function
// says otherwise.

namespace gpipe::python {

/// Builds a Python object from a value. A value that came from a Python object gets that object's structure; a value
/// of several tensors from C++ layers becomes a tuple; an undefined tensor becomes None.
pybind11::object to_python(const Value& value);

/// Takes the tensors and the structure of a Python object (see gpipe/structure.py). Errors: TypeError, as
/// pybind11::error_already_set, for objects that hold anything but tensors and None.
Value to_value(const pybind11::handle& object);

/// Converts the structure of a Python object to bytes and back, for other ranks. Called without the lock. Errors: those of
/// gpipe.structure.encode() and decode(), as pybind11::error_already_set.
std::string encode_structure(const Structure& structure);
std::shared_ptr<const Structure> decode_structure(const std::string& bytes);

/// LanguageBinding::on_error of a pipeline of Python modules. Adds a note to a Python error that says where it was
/// raised. Throws a Python error with that note in place of any other exception. Called on a worker, without the lock.
void on_error(const ErrorInfo& info, const std::exception_ptr& error);

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
