#pragma once

#include <Python.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/runtime/mutex.h"
#include "python/src/interpreter.h"
#include "skip/context.h"

namespace gpipe::python {

/// The skips of a skippable module that is, or is nested in, a layer.
struct SkipNames {
  Reference module;
  std::vector<SkipKey> stashes;
  std::vector<SkipKey> pops;
};

/// Those of a module and of what is in it.
struct ModuleTensors {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
};

/// A Python module as a layer. Among C++ modules its mirror stands for it: a tree of modules that hold the same
/// parameters and buffers by the same names, as they were at the last refresh(), and declare the same skips. May be
/// destroyed on any thread.
class PythonLayer : public Layer {
 public:
  /// With the interpreter's lock.
  PythonLayer(std::string name, PyObject* module, std::vector<SkipNames> skips, std::shared_ptr<ThreadStates> states);

  /// Calls the module, on a thread without the interpreter's lock. Errors: pybind11::error_already_set.
  Value forward(Value input) override;
  const std::string& name() const override { return name_; }
  /// The mirror. On any thread.
  std::shared_ptr<torch::nn::Module> module() const override;
  /// Of the Python module, by the names that it had at the last refresh(). On any thread.
  std::vector<at::Tensor> buffers() const override;
  void set_buffers(const std::vector<at::Tensor>& buffers) override;

  /// Takes over what parameters and buffers the module has now: in a new mirror, for a forward or backward that is
  /// under way reads the old one. Returns whether they are others than before. With the interpreter's lock.
  bool refresh();

  /// With the interpreter's lock. Errors: std::runtime_error when the module has other parameters than at the last
  /// refresh().
  void check_not_replaced() const;

  /// Calls visit(object) for each reference to a Python object that this holds; until one returns other than 0, which
  /// is the result.
  int traverse(absl::FunctionRef<int(PyObject*)> visit) const;

 private:
  /// Where a Python module keeps a buffer.
  struct Slot {
    Reference buffers;  ///< the dict of the module; none for a scripted module, which cannot replace the buffer
    Reference name;
    at::Tensor scripted;
  };
  using Slots = std::vector<Slot>;

  std::string name_;
  std::shared_ptr<ThreadStates> states_;
  Reference module_;
  std::vector<SkipNames> skips_;
  ModuleTensors mirrored_;
  mutable Mutex mutex_;
  std::shared_ptr<torch::nn::Module> mirror_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const Slots> slots_ ABSL_GUARDED_BY(mutex_);

  static void find_slots(PyObject* module, Slots& slots);
  std::shared_ptr<const Slots> slots() const;
};

/// Calls a Python callable with a value, on a thread without the interpreter's lock.
Value call(PyObject* callable, Value input, ThreadStates& states);

}  // namespace gpipe::python
