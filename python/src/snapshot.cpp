#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "gpipe/base/checks.h"
#include "gpipe/snapshot/folder.h"
#include "python/src/interpreter.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

using Tensors = py::typing::Dict<py::str, py::object>;

std::map<std::string, at::Tensor> to_map(const Tensors& tensors) {
  std::map<std::string, at::Tensor> map;
  for (const auto& [name, tensor] : tensors) {
    if (!THPVariable_Check(tensor.ptr())) {
      throw py::type_error("'" + std::string(py::str(name)) + "' is " + std::string(py::str(py::type::of(tensor))) +
                           ", not a Tensor");
    }
    map.emplace(name.cast<std::string>(), THPVariable_Unpack(tensor.ptr()));
  }
  return map;
}

/// Calls f(). Errors of the system become OSError, errors in a file's content ValueError.
template <typename F>
auto with_file(const std::filesystem::path& path, F f) {
  try {
    return f();
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw py::error_already_set();
  } catch (const std::runtime_error& error) {
    throw py::value_error("'" + path.string() + "': " + reason_of(error.what()));
  }
}

/// `manifest` is a part's, as JSON. In one process there may be no pipeline.
void save_snapshot(const py::bytes& name, std::optional<PythonPipeline*> pipe, const Tensors& weights,
                   const Tensors& state, const py::bytes& manifest) {
  const std::filesystem::path path{std::string(name)};
  const auto make = [&] { return SnapshotPart{to_map(weights), to_map(state), parse_json(std::string(manifest))}; };
  const auto part = pipe.has_value() ? (*pipe)->convert(make) : make();
  const auto save = [&](GPipeImpl* over) { save_parts(path, over, [&] { return part; }); };
  if (!pipe.has_value()) return with_file(path, [&] { released([&] { save(nullptr); }); });
  (*pipe)->run([&](GPipeImpl& over) {
    try {
      save(&over);
    } catch (const std::system_error& error) {
      const Section section;
      with_file(path, [&] { throw error; });
    }
  });
}

void write_weights(const py::bytes& name, const Tensors& tensors, const std::string& model) {
  const std::filesystem::path path{std::string(name)};
  const Safetensors file{.tensors = to_map(tensors), .model = model};
  with_file(path, [&] { released([&] { write_safetensors(path, file); }); });
}

}  // namespace

void init_snapshot(py::module_& module) {
  module.def("save_snapshot", &save_snapshot);
  module.def("write_weights", &write_weights, "Writes tensors to a safetensors file, or a model.");
  py::class_<SnapshotReader>(module, "SnapshotReader")
      .def(py::init([](const py::bytes& name) {
        const std::filesystem::path path{std::string(name)};
        return with_file(path, [&] { return std::make_unique<SnapshotReader>(path); });
      }))
      .def_property_readonly("manifest", [](const SnapshotReader& reader) { return reader.manifest().dump(); })
      .def("weights", &SnapshotReader::weights)
      .def("read", [](SnapshotReader& reader, const std::string& name) {
        return with_file(reader.path(), [&] { return released([&] { return reader.read(name); }); });
      });
}

}  // namespace gpipe::python
