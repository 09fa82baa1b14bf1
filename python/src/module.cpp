#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "python/src/interpreter.h"
#include "python/src/pipeline.h"

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  using namespace gpipe::python;

  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(error);
    } catch (python_error& raised) {
      raised.restore();
    }
  });
  init_ranks(module);
  init_training(module);
  init_schedule(module);
  init_pipeline(module);
  init_snapshot(module);
  init_balance(module);
  reset_calls_after_fork();
  py::module_::import("atexit").attr("register")(py::cpp_function(&await_calls_at_exit));
}
