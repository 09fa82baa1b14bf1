#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <type_traits>

#include "gpipe/schedule/action.h"

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
template <typename T>
T checked(const Unchecked<T>& value, const char* name) {
  const char* check = std::is_same_v<T, bool>     ? "check_flag"
                      : std::is_same_v<T, int>    ? "check_whole"
                      : std::is_same_v<T, double> ? "check_number"
                                                  : "check_text";
  return pybind11::module_::import("gpipe.checks").attr(check)(value, name).template cast<T>();
}

/// Converts the name of a checkpoint mode. Errors: TypeError, as pybind11::error_already_set, if `name` is not a str;
/// std::invalid_argument for any other str.
Checkpoint to_checkpoint(const pybind11::handle& name);

}  // namespace gpipe::python

template <typename T>
struct pybind11::detail::handle_type_name<gpipe::python::Unchecked<T>> {
  static constexpr auto name = make_caster<T>::name;
};

template <>
struct pybind11::detail::type_caster<gpipe::Checkpoint> {
  PYBIND11_TYPE_CASTER(gpipe::Checkpoint, const_name("str"));
  bool load(handle name, bool) {
    value = gpipe::python::to_checkpoint(name);
    return true;
  }
  static handle cast(gpipe::Checkpoint mode, return_value_policy, handle) {
    return str(gpipe::to_string(mode)).release();
  }
};
