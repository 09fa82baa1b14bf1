#pragma once

#include <Python.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/base/mutex.h"
#include "gpipe/binding.h"
#include "python/src/interpreter.h"
#include "python/src/native_layer.h"
#include "skip/skippable.h"

namespace gpipe::python {

/// The skips that a Python module declares. The module is a layer or nested in one.
struct SkipNames {
  Reference module;
  std::vector<SkipKey> stashes;
  std::vector<SkipKey> pops;
  std::vector<SkipKey> peeks;
};

/// The parameters and buffers of a Python module and its submodules.
struct ModuleTensors {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
};

/// A Python module as a layer. Its mirror represents it among C++ modules: a tree of modules with the same parameters,
/// buffers and names, as they were at the last refresh(), and the same skips. May be destroyed on any thread.
class PythonLayer : public Layer {
 public:
  /// REQUIRES: the interpreter's lock.
  PythonLayer(std::string name, PyObject* module, std::vector<SkipNames> skips, std::shared_ptr<ThreadStates> states);

  /// Calls the module. REQUIRES: the thread does not hold the interpreter's lock. Errors:
  /// pybind11::error_already_set.
  Value forward(Value input) override;
  const std::string& name() const override { return name_; }
  /// The mirror. Thread-safe.
  std::shared_ptr<torch::nn::Module> module() const override;
  /// The buffers and modes that the module and its submodules have now. Thread-safe.
  Buffers buffers() const override;
  /// The parameters that the module and its submodules have now. Thread-safe.
  std::vector<at::Tensor> parameters() const override;

  /// Reads the module's parameters and buffers. If any has been replaced, makes a new mirror: a forward or backward in
  /// progress continues with the old one. Returns whether it made one. REQUIRES: the interpreter's lock.
  bool refresh();

  /// Errors: std::runtime_error if a parameter of the module was replaced after the last refresh(), except by the
  /// making of more. REQUIRES: the interpreter's lock.
  void check_not_replaced() const;

  /// Runs the layer without Python; null if its module is not of a converted model, or needs Python.
  const NativeLayer* native() const { return native_.get(); }
  /// As NativeLayer::prepare(). REQUIRES: the interpreter's lock.
  bool prepare_native() { return native_ && native_->prepare(module_.get()); }

  /// Calls visit(object) for each Python object that the layer owns, until a call returns a value other than 0. Returns
  /// that value, or 0.
  int traverse(absl::FunctionRef<int(PyObject*)> visit) const;

 private:
  /// A module, and where it stores its buffers.
  struct Place {
    Reference module;
    Reference buffers;                 ///< its dict of buffers; null for a scripted module, which cannot replace them
    Reference children;                ///< its dict of submodules; null for a scripted module
    Py_ssize_t count = 0;              ///< of submodules
    std::vector<at::Tensor> scripted;  ///< the buffers of a scripted module
  };
  using Places = std::vector<Place>;

  std::string name_;
  std::shared_ptr<ThreadStates> states_;
  Reference module_;
  std::vector<SkipNames> skips_;
  ModuleTensors mirrored_;
  const std::unique_ptr<NativeLayer> native_;
  mutable Mutex mutex_;
  std::shared_ptr<torch::nn::Module> mirror_ ABSL_GUARDED_BY(mutex_);
  mutable std::shared_ptr<const Places> places_ ABSL_GUARDED_BY(mutex_);

  static void find_places(PyObject* module, Places& places);
  /// What places() has found, or null.
  std::shared_ptr<const Places> known_places() const;
  /// REQUIRES: the interpreter's lock.
  std::shared_ptr<const Places> places() const;
};

/// Calls a Python callable with values. REQUIRES: the thread does not hold the interpreter's lock.
Value call(PyObject* callable, std::vector<Value> arguments, ThreadStates& states);

}  // namespace gpipe::python
