#include <pybind11/stl.h>

#include "gpipe/drawing.h"
#include "gpipe/memory_reuse.h"
#include "gpipe/timeline.h"
#include "python/src/checks.h"
#include "python/src/pipeline.h"

namespace gpipe::python {

namespace py = pybind11;

void init_trace(py::module_& module) {
  py::class_<Timeline, std::shared_ptr<Timeline>>(module, "Timeline",
                                                  "The actions of a pipeline's workers, measured or simulated.")
      .def(py::init<>())
      .def_readonly("workers", &Timeline::workers, "Number of workers.")
      .def("makespan", &Timeline::makespan,
           "Returns the seconds from the start of the first action to the end of the last.")
      .def("bubble", &Timeline::bubble, "Returns the idle time as a share of the workers' total time, from 0 to 1.")
      .def("peak_bytes", &Timeline::peak_bytes, "Returns for each worker the peak bytes in use for its cells.")
      .def("to_chrome_json", &to_chrome_json,
           "Returns the timeline in Chrome's trace event format, which ui.perfetto.dev opens.")
      .def("to_svg", &to_svg, "Returns a drawing as SVG text: a row per worker, a box per action.")
      .def("_repr_svg_", &to_svg);
  module.def(
      "reuse_cpu_memory", [](const Unchecked<bool>& on) { reuse_cpu_memory(checked(on, "on")); }, py::arg("on") = true,
      R"(Turns on, or off, a memory pool for CPU tensors of 64 KiB and more.

Freed tensor memory is kept for reuse, so that after the first few steps, training does not allocate memory from the
system. The pool belongs to the process and never shrinks.

Call this at the start of the program, before other threads create tensors.

Args:
    on: whether new tensors take their memory from the pool.)");
}

}  // namespace gpipe::python
