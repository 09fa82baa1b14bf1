#pragma once

#include <Python.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "gpipe/autograd/layer.h"
#include "python/src/interpreter.h"
#include "skip/context.h"

namespace gpipe::python {

/// The skips of a skippable module that is, or is nested in, a layer.
struct SkipNames {
  Reference module;
  std::vector<SkipKey> stashes;
  std::vector<SkipKey> pops;
};

/// A Python module as a layer. Among C++ modules its mirror stands for it: a tree of modules that hold the same parameters
/// and buffers by the same names, as they were at the last refresh(), and declare the same skips. May be destroyed on any
/// thread.
class PythonLayer : public Layer {
 public:
  /// With the interpreter's lock.
  PythonLayer(std::string name, PyObject* module, std::vector<SkipNames> skips, std::shared_ptr<ThreadStates> states);

  /// Calls the module, on a thread without the interpreter's lock. Errors: pybind11::error_already_set.
  Value forward(Value input) override;
  const std::string& name() const override { return name_; }
  std::shared_ptr<torch::nn::Module> module() const override { return holder_; }

  /// Takes over what parameters and buffers the module has now. With the interpreter's lock, while no forward runs.
  void refresh();

 private:
  std::string name_;
  std::shared_ptr<ThreadStates> states_;
  Reference module_;
  std::vector<SkipNames> skips_;
  std::shared_ptr<torch::nn::Module> holder_;  // of the mirror, which changes
  std::vector<at::Tensor> mirrored_;
};

/// Calls a Python callable with a value, on a thread without the interpreter's lock.
Value call(PyObject* callable, Value input, ThreadStates& states);

}  // namespace gpipe::python
