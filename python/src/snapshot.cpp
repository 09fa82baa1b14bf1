#include <pybind11/pybind11.h>
#include <pybind11/typing.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

#include "gpipe/snapshot/archive.h"
#include "gpipe/snapshot/content.h"
#include "python/src/interpreter.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// Decodes text as Python's pickle does, which allows lone surrogates. Decodes text that is not UTF-8 as Python does for
/// file names.
py::object decoded(const std::string& text) {
  const auto size = static_cast<Py_ssize_t>(text.size());
  auto* result = PyUnicode_DecodeUTF8(text.data(), size, "surrogatepass");
  if (result == nullptr) {
    PyErr_Clear();
    result = PyUnicode_DecodeUTF8(text.data(), size, "surrogateescape");
  }
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object convert(const Plain& plain) {
  const auto items = [](const std::vector<Plain>& plains) {
    py::list list;
    for (const auto& each : plains) list.append(convert(each));
    return list;
  };
  return std::visit(
      [&]<class Value>(const Value& value) -> py::object {
        if constexpr (std::is_same_v<Value, std::monostate>) {
          return py::none();
        } else if constexpr (std::is_same_v<Value, std::string>) {
          return decoded(value);
        } else if constexpr (std::is_same_v<Value, at::Tensor>) {
          return py::reinterpret_steal<py::object>(to_python(value));
        } else if constexpr (std::is_same_v<Value, Plain::Tuple>) {
          return py::tuple(items(value.items));
        } else if constexpr (std::is_same_v<Value, Plain::List>) {
          return items(value);
        } else if constexpr (std::is_same_v<Value, Plain::Dict>) {
          py::dict dict;
          for (const auto& [key, item] : value) dict[decoded(key)] = convert(item);
          return dict;
        } else {
          return py::cast(value);
        }
      },
      plain.value);
}

std::string encoded(const py::handle& text) {
  const auto bytes = py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogatepass"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

/// REQUIRES: the value consists of the types of Plain.
Plain to_plain(const py::handle& value) {
  const auto items = [&] {
    Plain::List list;
    for (const auto& item : value) list.push_back(to_plain(item));
    return list;
  };
  if (value.is_none()) return {};
  if (py::isinstance<py::bool_>(value)) return {value.cast<bool>()};
  if (py::isinstance<py::int_>(value)) return {value.cast<std::int64_t>()};
  if (py::isinstance<py::float_>(value)) return {value.cast<double>()};
  if (py::isinstance<py::str>(value)) return {encoded(value)};
  if (THPVariable_Check(value.ptr())) return {THPVariable_Unpack(value.ptr())};
  if (py::isinstance<py::tuple>(value)) return {Plain::Tuple{items()}};
  if (py::isinstance<py::list>(value)) return {items()};
  Plain::Dict dict;
  for (const auto& [key, item] : value.cast<py::dict>()) dict.push_back({encoded(key), to_plain(item)});
  return {std::move(dict)};
}

void check_snapshot(const py::typing::Dict<py::str, py::object>& content) {
  static_cast<void>(from_content(to_plain(content)));
}

py::object read_snapshot(const py::object& path) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw py::error_already_set();
  const auto name = py::reinterpret_steal<py::bytes>(encoded);
  const std::filesystem::path file(static_cast<std::string>(name));
  try {
    const auto content = released([&] {
      auto read = read_archive(file);
      static_cast<void>(from_content(read));
      return read;
    });
    return convert(content);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
    throw py::error_already_set();
  } catch (const std::runtime_error& error) {
    throw py::value_error("cannot read the snapshot '" + file.string() + "': " + error.what());
  }
}

}  // namespace

void init_snapshot(py::module_& module) {
  module.def("check_snapshot", &check_snapshot, py::arg("content"));
  module.def("read_snapshot", &read_snapshot, py::arg("path"),
             "Reads a snapshot file, checks it and returns its dict.");
}

}  // namespace gpipe::python
