#include <pybind11/stl.h>

#include "gpipe/schedule/drawing.h"
#include "gpipe/schedule/timeline.h"
#include "python/src/pipeline.h"

namespace gpipe::python {

namespace py = pybind11;

void init_trace(py::module_& module) {
  py::class_<Timeline, std::shared_ptr<Timeline>>(module, "Timeline",
                                                  "What happened on a pipeline's workers, or is predicted to happen.")
      .def(py::init<>())
      .def_readonly("workers", &Timeline::workers)
      .def("makespan", &Timeline::makespan, "Seconds from the first action's start to the last one's end.")
      .def("bubble", &Timeline::bubble, "The share of the workers' time that none of them used.")
      .def("peak_bytes", &Timeline::peak_bytes, "Of each worker, the most bytes in use for its cells at once.")
      .def("to_chrome_json", &to_chrome_json, "Chrome's trace event format, which ui.perfetto.dev opens.")
      .def("to_svg", &to_svg, "A drawing: a row for each worker, a box for each action.")
      .def("_repr_svg_", &to_svg);
}

}  // namespace gpipe::python
