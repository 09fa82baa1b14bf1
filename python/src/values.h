#pragma once

#include <Python.h>

#include "gpipe/autograd/value.h"

// Between Python objects and values of the library. To be called with the interpreter's lock.

namespace gpipe::python {

/// The object that a value was taken from, with the value's tensors; a tuple for what C++ layers return, None for what
/// is undefined. A new reference.
PyObject* to_python(const Value& value);
PyObject* to_python(const at::Tensor& tensor);

/// Of a tensor, or of tensors and None in tuples, named tuples, lists and dicts (see gpipe/structure.py).
/// Errors: pybind11::error_already_set, TypeError for anything else.
Value to_value(PyObject* object);

}  // namespace gpipe::python
