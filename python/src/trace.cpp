#include <pybind11/stl.h>

#include "gpipe/runtime/memory_reuse.h"
#include "gpipe/schedule/drawing.h"
#include "gpipe/schedule/timeline.h"
#include "python/src/pipeline.h"

namespace gpipe::python {

namespace py = pybind11;

void init_trace(py::module_& module) {
  py::class_<Timeline, std::shared_ptr<Timeline>>(module, "Timeline",
                                                  "What happened on a pipeline's workers, or is predicted to happen.")
      .def(py::init<>())
      .def_readonly("workers", &Timeline::workers, "How many workers there were.")
      .def("makespan", &Timeline::makespan, "Seconds from the first action's start to the last one's end.")
      .def("bubble", &Timeline::bubble, "The share of the workers' time that none of them used.")
      .def("peak_bytes", &Timeline::peak_bytes, "Of each worker, the most bytes in use for its cells at once.")
      .def("to_chrome_json", &to_chrome_json, "Chrome's trace event format, which ui.perfetto.dev opens.")
      .def("to_svg", &to_svg, "A drawing: a row for each worker, a box for each action.")
      .def("_repr_svg_", &to_svg);
  module.def("reuse_cpu_memory", &reuse_cpu_memory, py::arg("on") = true,
             R"(From now on, or with False no longer, CPU tensors of 64 KiB and more take their memory from a pool.

The pool keeps what is freed for the next tensor of about that size: a training step then asks the system for no memory
once the first few have run. It belongs to the process and never shrinks. Call this first, before tensors are made in
other threads.)");
}

}  // namespace gpipe::python
