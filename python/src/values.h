#pragma once

#include <Python.h>

#include "gpipe/autograd/value.h"

// Between Python objects and values of the library. To be called with the interpreter's lock.

namespace gpipe::python {

/// A tensor, or a tuple; None for what is undefined. A new reference.
PyObject* to_python(const Value& value);
PyObject* to_python(const at::Tensor& tensor);

/// Errors: pybind11::type_error for anything but a tensor, or a tuple of tensors and None.
Value to_value(PyObject* object);

}  // namespace gpipe::python
