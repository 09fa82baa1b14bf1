#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpipe/assembly/workers.h"
#include "gpipe/base/checks.h"
#include "gpipe/ranks.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"
#include "gpipe/simulator.h"
#include "gpipe/timeline.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

ParsedSchedule generate(const std::string& name, std::vector<int> placement, int chunks, Checkpoint checkpoint) {
  Layout layout{static_cast<int>(placement.size()), chunks, std::move(placement)};
  auto schedule = make_schedule(name, layout, checkpoint);
  return {std::move(layout), std::move(schedule)};
}

/// Runs a schedule in simulated time. `seconds` of every stage's actions, indexed by Kind. Errors:
/// std::invalid_argument if it cannot run.
Simulation simulated(const ParsedSchedule& made, const std::array<double, 5>& seconds) {
  const auto stages = made.layout.placement.size();
  const auto program = Program::make(made.layout, cut_edges(std::vector<std::int64_t>(stages, 1), {}), made.schedule);
  return simulate(program, {.actions = {stages, seconds}, .edges = std::vector<double>(program.edges().size())});
}

/// The name and summary of each schedule, and whether it places two stages on each worker, in a V.
std::vector<std::tuple<std::string, std::string, bool>> rules() {
  std::vector<std::tuple<std::string, std::string, bool>> rules;
  for (const auto& rule : schedule_rules()) {
    rules.emplace_back(rule.name, rule.summary, rule.place(4, 1) == v_placement(4));
  }
  return rules;
}

std::string drawn(const Timeline& timeline) {
  return py::module_::import("gpipe.drawing").attr("to_svg")(to_chrome_json(timeline)).cast<std::string>();
}

/// Returns the device of each worker, the worker of each stage, and the rank of each worker.
std::tuple<std::vector<torch::Device>, std::vector<int>, std::vector<int>> arranged(
    const std::vector<torch::Device>& devices, std::size_t stages, const std::string& schedule,
    const std::vector<int>& placement, std::optional<std::shared_ptr<Ranks>> ranks) {
  auto options = GPipeOptions().schedule(schedule).placement(placement);
  options.ranks(std::move(ranks).value_or(nullptr));
  const auto workers = arrange_workers(options.devices(devices), stages);
  return {workers.devices, workers.schedules.placement, workers.ranks};
}

}  // namespace

Checkpoint to_checkpoint(const py::handle& name) {
  const auto modes = checkpoints();
  const bool is_text = py::isinstance<py::str>(name);
  if (const auto mode = modes.find(is_text ? name.cast<std::string>() : ""); mode != modes.end()) return mode->second;
  const auto message =
      "checkpoint must be 'always', 'except_last' or 'never', but is " + py::repr(name).cast<std::string>();
  if (is_text) throw std::invalid_argument(message);
  throw py::type_error(message);
}

void init_schedule(py::module_& module) {
  py::class_<Timeline, std::shared_ptr<Timeline>>(module, "Timeline",
                                                  "The actions of a pipeline's workers, measured or simulated.")
      .def(py::init<>())
      .def_readonly("workers", &Timeline::workers, "Number of workers.")
      .def("makespan", &Timeline::makespan, "Returns the seconds from the first action's start to the last one's end.")
      .def("bubble", &Timeline::bubble, "Returns the idle time as a share of the workers' total time, from 0 to 1.")
      .def("peak_bytes", &Timeline::peak_bytes, "Returns for each worker the peak bytes in use for its cells.")
      .def("to_chrome_json", &to_chrome_json, "Returns Chrome's trace event format, which ui.perfetto.dev opens.")
      .def("to_svg", &drawn, "Returns a drawing as SVG text: a row per worker, a box per action.")
      .def("_repr_svg_", &drawn);
  py::class_<Simulation>(module, "Simulation")
      .def_readonly("timeline", &Simulation::timeline)
      .def_readonly("makespan", &Simulation::makespan)
      .def_readonly("bubble", &Simulation::bubble)
      .def_readonly("peak_cells", &Simulation::peak_cells);
  py::class_<ParsedSchedule>(module, "Schedule")
      .def(py::init(&generate))
      .def_static("read", &read_schedule)
      .def_property_readonly("stages", [](const ParsedSchedule& made) { return made.layout.stages; })
      .def_property_readonly("workers", [](const ParsedSchedule& made) { return made.schedule.size(); })
      .def_property_readonly("chunks", [](const ParsedSchedule& made) { return made.layout.micro_batches; })
      .def_property_readonly("placement", [](const ParsedSchedule& made) { return made.layout.placement; })
      .def("simulate", &simulated)
      .def("__str__", [](const ParsedSchedule& made) { return to_text(made.schedule); });
  module.def("schedule_rules", &rules);
  module.def("v_placement", &v_placement);
  module.def("fills_and_drains", &fills_and_drains);
  module.def("place_stages", [](const std::string& schedule, int stages, int per_worker) {
    return schedule_source(schedule, stages, schedule.starts_with('@') ? 1 : per_worker, {}).placement;
  });
  module.def("arrange_workers", &arranged);
  module.def("check_balance", &check_balance);
  module.def("check_chunks", &check_chunks);
  module.def("check_checkpoint", [](Checkpoint mode) { return mode; });
}

}  // namespace gpipe::python
