#include "python/src/checks.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpipe/assembly/workers.h"
#include "gpipe/base/checks.h"
#include "gpipe/gpipe.h"
#include "gpipe/ranks.h"
#include "gpipe/schedule/program.h"

namespace gpipe::python {
namespace py = pybind11;

namespace {

py::object checked_by(const char* function, const py::object& value, const char* name) {
  return py::module_::import("gpipe.checks").attr(function)(value, name);
}

}  // namespace

int checked(const Unchecked<int>& value, const char* name) {
  return checked_by("check_whole", value, name).cast<int>();
}

double checked(const Unchecked<double>& value, const char* name) {
  return checked_by("check_number", value, name).cast<double>();
}

bool checked(const Unchecked<bool>& value, const char* name) {
  return checked_by("check_flag", value, name).cast<bool>();
}

std::string checked(const Unchecked<std::string>& value, const char* name) {
  return checked_by("check_text", value, name).cast<std::string>();
}

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
      "arrange_workers",
      [](const std::vector<std::string>& devices, std::size_t stages, const std::string& schedule,
         int stages_per_worker, const std::vector<int>& placement, std::optional<std::shared_ptr<Ranks>> ranks) {
        auto options = GPipeOptions().schedule(schedule).stages_per_worker(stages_per_worker).placement(placement);
        options.ranks(std::move(ranks).value_or(nullptr));
        const auto workers = arrange_workers(options.devices({devices.begin(), devices.end()}), stages);
        std::vector<std::string> names;
        for (const auto& device : workers.devices) names.push_back(device.str());
        return std::make_tuple(names, workers.schedules.placement, workers.ranks);
      },
      py::arg("devices"), py::arg("stages"), py::arg("schedule"), py::arg("stages_per_worker"), py::arg("placement"),
      py::arg("ranks"), "Returns the device of each worker, the worker of each stage, and the rank of each worker.");
}

}  // namespace gpipe::python
