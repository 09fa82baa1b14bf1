#pragma once

#include <Python.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/base/mutex.h"
#include "gpipe/graph/graph.h"
#include "python/src/interpreter.h"

namespace gpipe::python {

/// Runs a layer of a converted model (gpipe.exported.layer.ExportedLayer) without Python.
class NativeLayer {
 public:
  /// Returns null for any other module, and for a layer that calls Python functions. `keys` are its stashes, pops and
  /// peeks. REQUIRES: the interpreter's lock.
  static std::unique_ptr<NativeLayer> make(PyObject* module, const std::vector<SkipKey>& keys);

  /// Reads the mode of the model, and the tensors of its mirror if that is another one than before. REQUIRES: the
  /// interpreter's lock.
  void refresh(const std::shared_ptr<torch::nn::Module>& mirror);

  /// Whether a call can run the layer without Python: all its tensors are registered, and nothing is hooked to its
  /// module. REQUIRES: the interpreter's lock.
  bool prepare();

  /// What the layer computes with since the last prepare(). Thread-safe.
  std::shared_ptr<const Graph::State> state() const;

  /// Runs the layer, which takes and returns tensors. Thread-safe. REQUIRES: the thread does not hold the interpreter's
  /// lock. Errors: as Graph::run().
  Value run(Value input, const Graph::State& state, const std::vector<Borrowed>& borrowed) const;

  /// As PythonLayer::traverse().
  int traverse(absl::FunctionRef<int(PyObject*)> visit) const;

 private:
  NativeLayer(PyObject* module, std::shared_ptr<const Graph> graph)
      : module_(reference_to(module)), graph_(std::move(graph)) {}

  const Reference module_;
  const std::shared_ptr<const Graph> graph_;

  // By the interpreter's lock.
  Reference model_;
  std::shared_ptr<torch::nn::Module> mirror_;
  std::shared_ptr<const Graph::State> values_;  // null if a tensor is not in the mirror
  bool is_training_ = false;
  Graph::State keys_;

  mutable Mutex mutex_;
  std::shared_ptr<const Graph::State> state_ ABSL_GUARDED_BY(mutex_);
};

/// Runs the graph of a layer on its tensors, without those that are constants. Returns those that its mode has.
std::vector<at::Tensor> run_graph(const Graph& graph, std::vector<at::Tensor> inputs, const Graph::State& state);

/// Whether a call of the module does what its class says: it has no hooks, no `forward` of its own and is not compiled.
/// REQUIRES: the interpreter's lock.
bool is_plain(const pybind11::handle& module);

/// Whether no hook or mode of torch changes the calls of all modules and functions. REQUIRES: the interpreter's lock.
bool calls_are_plain();

}  // namespace gpipe::python
