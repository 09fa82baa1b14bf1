#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpipe/gpipe.h"
#include "gpipe/loss.h"
#include "gpipe/rank_state.h"
#include "gpipe/timeline.h"
#include "python/src/layer.h"

namespace gpipe::python {

/// A list and a tuple, for the signatures that Python shows.
using Objects = pybind11::typing::List<pybind11::object>;
using Pair = pybind11::typing::Tuple<pybind11::object, pybind11::object>;

/// A pipeline of Python modules. REQUIRES, for all methods: the interpreter's lock.
class PythonPipeline {
 public:
  /// `stages` holds for each stage a tuple (module that runs the stage, list of its layers). See make_layers() for the
  /// layers. Errors: those of GPipe.
  PythonPipeline(const Objects& stages, GPipeOptions options);
  ~PythonPipeline();

  /// Reads the parameters and buffers that the modules have now; later calls use them. Returns false if stages share other
  /// parameters than before: then make a new pipeline.
  bool refresh();

  /// Runs a mini-batch, of a training or of an evaluation. Errors: those of GPipe and to_checkpoint(); errors of layers,
  /// with a note that says where they were raised.
  pybind11::object forward(const pybind11::object& input, std::int64_t chunks, const pybind11::object& checkpoint,
                           bool training);

  /// Trains on a mini-batch. `loss` is called with the output and the target of each micro-batch; `kind` is that of a
  /// LossFunction. Returns a tuple (detached loss, output or None). Errors: those of GPipe's step(); errors of layers and of
  /// `loss`, with a note.
  Pair step(const pybind11::object& input, const pybind11::object& target, const pybind11::object& loss,
            std::int64_t kind, const StepOptions& options, bool training);
  /// As step(), but returns the loss with its graph. See GPipe's loss().
  pybind11::object loss(const pybind11::object& input, const pybind11::object& target, const pybind11::object& loss,
                        std::int64_t kind, const StepOptions& options, bool training);

  /// Whether a stage is on this rank.
  bool is_here(int stage) const { return pipe_->is_here(stage); }

  /// Whether a call runs.
  bool busy() const { return calls_ > 0; }

  // As those of GPipe.
  pybind11::typing::List<pybind11::bytes> gather(const pybind11::bytes& bytes, const std::string& what);
  /// As gpipe::gather(). Errors of mine(), too, are errors of the other ranks' call.
  Snapshot gather(const StateNames& names, absl::FunctionRef<Snapshot()> mine);
  /// As gpipe::clip_grad_norm_(). Returns a tensor.
  pybind11::object clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite);
  void withdraw(const std::string& reason);

  void trace(std::optional<std::shared_ptr<Timeline>> timeline);

  /// Calls f() without the interpreter's lock.
  template <typename F>
  auto run(F f);
  GPipeImpl& gpipe() { return *pipe_; }

  /// For the garbage collector. traverse() visits the Python objects that only this pipeline owns; none while a graph
  /// still needs the pipeline. clear() drops them; afterwards only clear() and the destructor may be called.
  /// See PythonLayer::traverse() for the result.
  int traverse(absl::FunctionRef<int(PyObject*)> visit) const;
  void clear();

 private:
  /// What the other ranks compare.
  void set_training(bool training);
  /// Calls f(), which converts the arguments of a call. On an error, the other ranks' call throws too.
  template <typename F>
  auto convert(F f);

  std::shared_ptr<ThreadStates> states_ = std::make_shared<ThreadStates>();
  int calls_ = 0;                     // calls of run() in progress; guarded by the interpreter's lock
  std::vector<Reference> stages_;     // of this rank
  std::vector<PythonLayer*> layers_;  // of this rank; owned by pipe_
  GPipe pipe_{nullptr};
};

/// Makes the layers of one stage. Each item of `layers` is a tuple (name, module, skips). `skips` has a tuple
/// (module, stashes, pops) for each skippable module that is the layer or nested in it; see to_keys().
std::vector<std::unique_ptr<Layer>> make_layers(const Objects& layers, const std::shared_ptr<ThreadStates>& states);

/// Converts a list of tuples (Namespace, name).
std::vector<SkipKey> to_keys(const pybind11::handle& names);

/// Makes a loss function of a Python callable that returns a tensor. REQUIRES: the interpreter's lock.
LossFunction to_loss(const pybind11::object& callable, std::int64_t kind, std::shared_ptr<ThreadStates> states);

/// Raises what signal handlers raise, such as KeyboardInterrupt.
void poll();

void init_balance(pybind11::module_& module);
void init_pipeline(pybind11::module_& module);
void init_randomness(pybind11::module_& module);
void init_ranks(pybind11::module_& module);
void init_schedule(pybind11::module_& module);
void init_step(pybind11::module_& module);
void init_skip(pybind11::module_& module);
void init_snapshot(pybind11::module_& module);
void init_trace(pybind11::module_& module);

}  // namespace gpipe::python
