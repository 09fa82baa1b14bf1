#include "gpipe/snapshot.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cerrno>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "gpipe/base/checks.h"
#include "gpipe/rank_state.h"
#include "gpipe/snapshot/safetensors.h"
#include "python/src/interpreter.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

using Tensors = py::typing::Dict<py::str, py::object>;
/// The content of a file: its tensors by name, and the text of Safetensors::training.
using Content = std::pair<std::map<std::string, at::Tensor>, std::string>;
using Names = std::vector<std::pair<std::string, std::string>>;

Safetensors to_file(const Tensors& tensors, const std::string& training) {
  Safetensors file;
  for (const auto& [name, tensor] : tensors) {
    if (!THPVariable_Check(tensor.ptr())) {
      throw py::type_error("'" + std::string(py::str(name)) + "' of the snapshot is " +
                           std::string(py::str(py::type::of(tensor))) + ", not a Tensor");
    }
    file.tensors.emplace(name.cast<std::string>(), THPVariable_Unpack(tensor.ptr()));
  }
  file.training = training;
  return file;
}

Content to_content(Safetensors file) { return {std::move(file.tensors), std::move(file.training)}; }

/// Calls f() without the interpreter's lock. Converts errors of files.
template <typename F>
auto with_file(const std::filesystem::path& path, F f) {
  try {
    return released(f);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw py::error_already_set();
  } catch (const std::runtime_error& error) {
    throw py::value_error("'" + path.string() + "': " + reason_of(error.what()));
  }
}

void write_snapshot(const py::bytes& name, const Tensors& tensors, const std::string& training) {
  const std::filesystem::path path{std::string(name)};
  const auto file = to_file(tensors, training);
  // Reading it would do the same checks. The text of equal snapshots becomes equal.
  with_file(path, [&] { write_safetensors(path, to_safetensors(from_safetensors(file))); });
}

Content read_snapshot(const py::bytes& name) {
  const std::filesystem::path path{std::string(name)};
  return to_content(with_file(path, [&] {
    auto file = read_safetensors(path);
    static_cast<void>(from_safetensors(file));
    return file;
  }));
}

void write_weights(const py::bytes& name, const Tensors& tensors, const std::string& model) {
  const std::filesystem::path path{std::string(name)};
  auto file = to_file(tensors, "");
  file.model = model;
  with_file(path, [&] { write_safetensors(path, file); });
}

Content gather_snapshot(PythonPipeline& pipe, const Tensors& tensors, const std::string& training, Names whole,
                        const std::vector<std::string>& own) {
  const StateNames names{std::move(whole), {own.begin(), own.end()}};
  const auto mine = pipe.convert([&] { return from_safetensors(to_file(tensors, training)); });
  return to_content(to_safetensors(pipe.run([&](GPipeImpl& gpipe) { return gather(gpipe, names, mine); })));
}

Content part_of_snapshot(const Tensors& tensors, const std::string& training, Names whole,
                         const std::vector<std::string>& own) {
  const StateNames names{std::move(whole), {own.begin(), own.end()}};
  return to_content(to_safetensors(own_part(names, from_safetensors(to_file(tensors, training)))));
}

}  // namespace

void init_snapshot(py::module_& module) {
  module.def("write_snapshot", &write_snapshot);
  module.def("read_snapshot", &read_snapshot);
  module.def("write_weights", &write_weights, "Writes tensors to a safetensors file, or a model.");
  module.def("gather_snapshot", &gather_snapshot);
  module.def("part_of_snapshot", &part_of_snapshot);
}

}  // namespace gpipe::python
