#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/base/mutex.h"
#include "gpipe/graph/graph.h"

namespace gpipe::python {

/// Runs a layer of a converted model (gpipe.exported.layer.ExportedLayer) without Python.
class NativeLayer {
 public:
  /// Returns null for any other module, and for a layer that calls Python functions. `keys` are its stashes, pops and
  /// peeks. REQUIRES: the interpreter's lock.
  static std::unique_ptr<NativeLayer> make(const pybind11::handle& module, const std::vector<SkipKey>& keys);

  /// Reads the mode of the module's model, and its tensors if some were replaced. REQUIRES: the interpreter's lock.
  void refresh(const pybind11::handle& module, bool replaced);

  /// Whether a call can run the layer without Python: all its tensors are registered, and nothing is hooked to its
  /// module. REQUIRES: the interpreter's lock.
  bool prepare(const pybind11::handle& module);

  /// What the layer computes with since the last prepare(). Thread-safe.
  std::shared_ptr<const Graph::State> state() const;

  /// Runs the layer, which takes and returns tensors. Thread-safe. REQUIRES: the thread does not hold the interpreter's
  /// lock. Errors: as Graph::run().
  Value run(Value input, const Graph::State& state, const std::vector<Borrowed>& borrowed) const;

 private:
  explicit NativeLayer(std::shared_ptr<const Graph> graph) : graph_(std::move(graph)) {}

  const std::shared_ptr<const Graph> graph_;
  std::shared_ptr<const Graph::State> values_;  // null if the module lacks a tensor; guarded by the interpreter's lock
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
