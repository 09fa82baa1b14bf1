#include "python/src/checks.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "gpipe/checks.h"

namespace gpipe::python {
namespace py = pybind11;

Checkpoint to_checkpoint(const py::object& name) {
  const auto message = [&] {
    return "checkpoint must be 'always', 'except_last' or 'never', but is " + py::repr(name).cast<std::string>();
  };
  if (!py::isinstance<py::str>(name)) throw py::type_error(message());
  const auto modes = checkpoints();
  const auto mode = modes.find(name.cast<std::string>());
  if (mode == modes.end()) throw std::invalid_argument(message());
  return mode->second;
}

void init_checks(py::module_& module) {
  module.def("check_balance", &check_balance, py::arg("balance"), py::arg("layers"));
  module.def("check_chunks", &check_chunks, py::arg("chunks"));
  module.def(
      "check_checkpoint", [](const py::object& name) { return to_string(to_checkpoint(name)); }, py::arg("name"));
  module.def(
      "place_stages",
      [](const std::vector<std::string>& devices, std::size_t stages) {
        std::vector<std::string> names;
        for (const auto& device : place_workers({devices.begin(), devices.end()}, stages))
          names.push_back(device.str());
        return names;
      },
      py::arg("devices"), py::arg("stages"));
}

}  // namespace gpipe::python
