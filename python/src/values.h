#pragma once

#include <Python.h>

#include <memory>
#include <string>

#include "gpipe/tensors/value.h"

// Conversions between Python objects and values of the library. REQUIRES: the interpreter's lock.

namespace gpipe::python {

/// Builds a Python object from a value. A value that came from a Python object gets that object's structure; a value
/// of several tensors from C++ layers becomes a tuple; an undefined tensor becomes None. Returns a new reference.
PyObject* to_python(const Value& value);
PyObject* to_python(const at::Tensor& tensor);

/// Takes the tensors and the structure of a Python object (see gpipe/structure.py). Errors: TypeError, as
/// pybind11::error_already_set, for objects that hold anything but tensors and None.
Value to_value(PyObject* object);

/// Converts the structure of a Python object to bytes and back, for other ranks. Called without the interpreter's lock.
/// Errors: those of gpipe.structure.encode() and decode(), as pybind11::error_already_set.
std::string encode_structure(const Structure& structure);
std::shared_ptr<const Structure> decode_structure(const std::string& bytes);

}  // namespace gpipe::python
