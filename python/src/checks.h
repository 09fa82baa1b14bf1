#pragma once

#include <pybind11/pybind11.h>

#include "gpipe/schedule/generators.h"

namespace gpipe::python {

/// Converts the name of a checkpoint mode. Errors: TypeError, as pybind11::error_already_set, if `name` is not a str;
/// std::invalid_argument for any other str.
Checkpoint to_checkpoint(const pybind11::object& name);

void init_checks(pybind11::module_& module);

}  // namespace gpipe::python
