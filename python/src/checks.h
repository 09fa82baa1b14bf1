#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "gpipe/schedule/generators.h"

namespace gpipe::python {

inline bool is_object(PyObject*) { return true; }

/// An argument of a public function, which signatures show as a T. It may be any object, so that checked() can name it in an
/// error.
template <typename T>
class Unchecked : public pybind11::object {
  PYBIND11_OBJECT_DEFAULT(Unchecked, object, is_object)
  using object::object;
};

/// Converts an argument by the functions of gpipe.checks. Errors: their TypeError and ValueError, with `name`.
int checked(const Unchecked<int>& value, const char* name);
double checked(const Unchecked<double>& value, const char* name);
bool checked(const Unchecked<bool>& value, const char* name);
std::string checked(const Unchecked<std::string>& value, const char* name);

/// Converts the name of a checkpoint mode. Errors: TypeError, as pybind11::error_already_set, if `name` is not a str;
/// std::invalid_argument for any other str.
Checkpoint to_checkpoint(const pybind11::object& name);

void init_checks(pybind11::module_& module);

}  // namespace gpipe::python

template <typename T>
struct pybind11::detail::handle_type_name<gpipe::python::Unchecked<T>> {
  static constexpr auto name = make_caster<T>::name;
};
