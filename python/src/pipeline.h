#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpipe/gpipe.h"
#include "python/src/layer.h"

namespace gpipe::python {

/// A list, for the signature that Python shows.
using Objects = pybind11::typing::List<pybind11::object>;

/// A pipeline of Python modules. All methods are called with the interpreter's lock.
class PythonPipeline {
 public:
  /// `stages` has of each stage the module that runs it, and its layers: name, module, and of each of its
  /// skippable modules that, what it stashes and what it pops, as (namespace, name). Errors: those of GPipe.
  PythonPipeline(const Objects& stages, const std::vector<std::string>& devices, bool deferred_batch_norm);
  ~PythonPipeline();

  /// Errors: those of GPipe; what layers raise, with a note that says where.
  pybind11::object forward(const pybind11::object& input, std::int64_t chunks, const std::string& checkpoint);

  void trace(std::optional<std::shared_ptr<Timeline>> timeline);

  /// For Python's collector of cycles: visits what this alone keeps, nothing while a graph still needs the pipeline;
  /// see PythonLayer::traverse(). And lets go of it, after which no other method may be called but this.
  int traverse(absl::FunctionRef<int(PyObject*)> visit) const;
  void clear();

 private:
  int calls_ = 0;  // of forward() that are under way; guarded by the interpreter's lock
  std::vector<Reference> stages_;
  std::vector<PythonLayer*> layers_;  // of the pipeline
  GPipe pipe_{nullptr};
};

/// Layers of one stage, as PythonPipeline takes them.
std::vector<std::unique_ptr<Layer>> make_layers(const Objects& layers, const std::shared_ptr<ThreadStates>& states);

void init_balance(pybind11::module_& module);
void init_models(pybind11::module_& module);
void init_pipeline(pybind11::module_& module);
void init_randomness(pybind11::module_& module);
void init_skip(pybind11::module_& module);
void init_snapshot(pybind11::module_& module);
void init_trace(pybind11::module_& module);

/// Errors: std::invalid_argument.
Checkpoint to_checkpoint(const std::string& name);

}  // namespace gpipe::python
