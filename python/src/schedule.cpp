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
#include "gpipe/blame.h"
#include "gpipe/ranks.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"
#include "gpipe/simulator.h"
#include "gpipe/timeline.h"
#include "gpipe/watch.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

ParsedSchedule generate(const std::string& name, std::vector<int> placement, int chunks,
                        const Checkpoints& checkpoints) {
  Layout layout{static_cast<int>(placement.size()), chunks, std::move(placement)};
  auto schedule = make_schedule(name, layout, checkpoints);
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

std::string page_of(const Timeline& timeline) {
  return py::module_::import("gpipe.report").attr("to_page")(to_json_lines(timeline)).cast<std::string>();
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

Checkpoint to_checkpoint(const py::handle& mode) {
  const auto modes = checkpoints();
  const bool is_text = py::isinstance<py::str>(mode);
  if (const auto named = modes.find(is_text ? mode.cast<std::string>() : ""); named != modes.end())
    return named->second;
  if (PyIndex_Check(mode.ptr()) != 0 && !py::isinstance<py::bool_>(mode))
    return Checkpoint::in_flight(mode.cast<int>());
  const auto message =
      "checkpoint must be 'always', 'except_last', 'never', a number of micro-batches in flight, or a list of these, "
      "one "
      "per stage, but is " +
      py::repr(mode).cast<std::string>();
  if (is_text) throw std::invalid_argument(message);
  throw py::type_error(message);
}

py::object to_python(Checkpoint checkpoint) {
  const auto text = to_string(checkpoint);
  const py::object name = py::str(text);
  return checkpoints().contains(text) ? name : py::int_(name);
}

Checkpoints to_checkpoints(const py::handle& modes) {
  if (!py::isinstance<py::list>(modes) && !py::isinstance<py::tuple>(modes)) return to_checkpoint(modes);
  std::vector<Checkpoint> of_stages;
  for (const auto& mode : modes) of_stages.push_back(to_checkpoint(mode));
  return of_stages;
}

void init_schedule(py::module_& module) {
  py::class_<Timeline, std::shared_ptr<Timeline>>(module, "Timeline",
                                                  "The actions of a pipeline's workers, measured or simulated.")
      .def(py::init<>())
      .def_readonly("workers", &Timeline::workers, "Number of workers.")
      .def(
          "clear", [](Timeline& timeline) { timeline.spans.clear(), timeline.layers.clear(); }, "Forgets all actions.")
      .def("makespan", &Timeline::makespan, "Returns the seconds from the first action's start to the last one's end.")
      .def("bubble", &Timeline::bubble, "Returns the idle time as a share of the workers' total time, from 0 to 1.")
      .def("peak_bytes", &Timeline::peak_bytes, "Returns for each worker the peak bytes in use for its cells.")
      .def("to_chrome_json", &to_chrome_json, "Returns Chrome's trace event format, which ui.perfetto.dev opens.")
      .def("to_json_lines", &to_json_lines,
           "Returns a line of JSON per complete step: its actions, what each worker waited for, and where the time "
           "went.")
      .def("to_html", &page_of, "Returns a page that shows the steps, what each wait waited for, and the bytes.");
  py::class_<Watch>(module, "Watch").def(py::init<>()).def("show", &Watch::show);
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
  module.def("has_lists", &has_lists);
  module.def("place_stages", [](const std::string& schedule, int stages, int per_worker) {
    return schedule_source(schedule, stages, has_lists(schedule) ? 1 : per_worker, {}).placement;
  });
  module.def("arrange_workers", &arranged);
  module.def("check_balance", &check_balance);
  module.def("check_chunks", &check_chunks);
  module.def("check_checkpoint", [](Checkpoint mode) { return mode; });
  module.def("check_checkpoints", [](Checkpoints modes) { return modes; });
}

}  // namespace gpipe::python
