#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "gpipe/gpipe.h"
#include "gpipe/graph/graph.h"
#include "gpipe/loss.h"
#include "python/src/layer.h"

namespace gpipe::python {

/// A list and a tuple, for the signatures that Python shows.
using Objects = pybind11::typing::List<pybind11::object>;
using Pair = pybind11::typing::Tuple<pybind11::object, pybind11::object>;

/// A loss of torch: its graph, the graph's tensors, and whether output and target must have one shape.
using NativeLoss = std::tuple<std::shared_ptr<Graph>, std::vector<at::Tensor>, bool>;

/// A pipeline of Python modules. REQUIRES: the interpreter's lock. Errors: also those of layers, with notes.
class PythonPipeline {
 public:
  /// `stages` holds for each stage a tuple (module that runs the stage, list of its layers). See make_layers() for the
  /// layers. `parameter_places`: see LanguageBinding. Errors: as GPipe.
  PythonPipeline(const Objects& stages, GPipeOptions options, std::vector<std::size_t> parameter_places);
  ~PythonPipeline();

  /// Reads the modules' parameters and buffers. Returns false if stages share others than before: make a new one then.
  bool refresh();

  /// Runs a mini-batch, of a training or of an evaluation. Errors: as GPipe.
  Value forward(const pybind11::object& input, std::int64_t chunks, const Checkpoints& checkpoints, bool training);

  /// Calls GPipe's compute_loss(), which keeps the graph, or step(). `hold_state` is a LossFunction's. Returns a tuple
  /// (loss, output or None). Errors: as the method; errors of `loss`.
  Pair train(const pybind11::object& input, const pybind11::object& target, const pybind11::object& loss,
             const std::optional<NativeLoss>& native, std::shared_ptr<LossRecord> record,
             const pybind11::object& hold_state, const StepOptions& options, bool training, bool keeps_graph);

  /// Whether a call runs.
  bool busy() const { return calls_ > 0; }

  void withdraw(const std::string& reason);

  /// Calls f(), which converts the arguments of a call. On an error, the other ranks' call throws too.
  template <typename F>
  auto convert(F f) {
    try {
      return f();
    } catch (const std::exception& error) {
      withdraw(error.what());
      throw;
    }
  }

  /// Calls f(GPipeImpl&) without the interpreter's lock.
  template <typename F>
  auto run(F f) {
    ++calls_;
    const absl::Cleanup end_call = [this] { --calls_; };
    const SharedContext context;
    return released([&] { return f(*pipe_); });
  }

  /// For the garbage collector. traverse() visits the Python objects that only this pipeline owns; none while a graph
  /// still needs the pipeline; see PythonLayer::traverse(). After clear(), call only clear() and the destructor.
  int traverse(absl::FunctionRef<int(PyObject*)> visit) const;
  void clear();

 private:
  /// Sets the mode, which the other ranks compare, and finds the stages that run a call without Python.
  void prepare(const Value& input, bool training);

  std::shared_ptr<ThreadStates> states_ = std::make_shared<ThreadStates>();
  int calls_ = 0;  // calls of run() in progress; guarded by the interpreter's lock
  /// A stage of this rank.
  struct OwnStage {
    Reference module;
    std::vector<PythonLayer*> layers;  ///< owned by pipe_
    std::shared_ptr<std::atomic<bool>> is_native = std::make_shared<std::atomic<bool>>();
  };
  std::vector<OwnStage> stages_;
  GPipe pipe_{nullptr};
};

/// Makes the layers of one stage from the tuples of layers_of() in gpipe/partition.py.
std::vector<std::unique_ptr<Layer>> make_layers(const Objects& layers, const std::shared_ptr<ThreadStates>& states);

/// Makes a loss function of a Python callable that returns a tensor, and of what replaces it for tensors.
/// REQUIRES: the interpreter's lock.
LossFunction to_loss(const pybind11::object& callable, const std::optional<NativeLoss>& native,
                     std::shared_ptr<ThreadStates> states);

/// Raises what signal handlers raise, such as KeyboardInterrupt.
void poll();

void init_balance(pybind11::module_& module);
void init_graph(pybind11::module_& module);
void init_schedule(pybind11::module_& module);
void init_snapshot(pybind11::module_& module);
void init_training(pybind11::module_& module);

}  // namespace gpipe::python
