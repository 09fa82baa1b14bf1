#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "gpipe/loss.h"
#include "python/src/checks.h"
#include "python/src/interpreter.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

std::optional<Reduction> to_reduction(const py::object& name) {
  if (name.is_none()) return std::nullopt;
  if (py::isinstance<py::str>(name)) {
    const auto text = name.cast<std::string>();
    if (text == "mean") return Reduction::kMean;
    if (text == "sum") return Reduction::kSum;
  }
  throw std::invalid_argument("[gpipe] reduction must be 'mean' or 'sum', but is " +
                              py::repr(name).cast<std::string>());
}

/// Makes a StepOptions::count of a Python callable that returns a float.
std::function<double(const Value&)> to_count(const py::object& callable) {
  return [function = reference_to(callable.ptr())](const Value& target) {
    const Section section;
    const auto argument = py::reinterpret_steal<py::object>(to_python(target));
    const auto count = py::reinterpret_steal<py::object>(PyObject_CallOneArg(function.get(), argument.ptr()));
    if (!count) throw py::error_already_set();
    return count.cast<double>();
  };
}

StepOptions make_options(const std::optional<py::object>& count, const py::object& reduction, double scale,
                         bool return_output, std::int64_t chunks, const py::object& checkpoint, bool check) {
  auto options =
      StepOptions().reduction(to_reduction(reduction)).scale(scale).return_output(return_output).check(check);
  if (count) options.count(to_count(*count));
  return options.chunks(chunks).checkpoint(to_checkpoint(checkpoint));
}

std::pair<double, double> compare_losses(const py::object& loss, const py::object& output, const py::object& target,
                                         const StepOptions& options) {
  const auto function = to_loss(loss, /*kind=*/0, std::make_shared<ThreadStates>());
  const auto whole_output = to_value(output.ptr());
  const auto whole_target = to_value(target.ptr());
  const auto check =
      released([&] { return check_loss(function, whole_output, whole_target, options.chunks(), options); });
  return {check.whole, check.from_micro_batches};
}

}  // namespace

LossFunction to_loss(const py::object& callable, std::int64_t kind, std::shared_ptr<ThreadStates> states) {
  LossFunction loss = [function = reference_to(callable.ptr()), states = std::move(states)](const Value& output,
                                                                                            const Value& target) {
    // A tensor of any class, as checked() in losses.py has made sure.
    return call(function.get(), {output, target}, *states).tensors().front();
  };
  loss.kind = static_cast<std::size_t>(kind);
  return loss;
}

void init_step(py::module_& module) {
  py::class_<StepOptions>(module, "StepOptions")
      .def(py::init(&make_options), py::arg("count"), py::arg("reduction"), py::arg("scale"), py::arg("return_output"),
           py::arg("chunks"), py::arg("checkpoint"), py::arg("check"));
  module.def("check_loss", &compare_losses, py::arg("loss"), py::arg("output"), py::arg("target"), py::arg("options"));
}

}  // namespace gpipe::python
