#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>

#include "skip/skippable.h"

namespace gpipe {

/// What a layer of a converted model computes: calls of PyTorch's operators, as JSON describes them. They run above
/// autograd and autocast, as the model's own code does, and without Python. A value is freed after its last use.
/// Immutable. Thread-safe.
///
/// A description is a program, which calls any operator of this process.
///
/// The description is an object. Values have numbers, from 0 to "values" - 1. Every other member may be left out.
///
///   "inputs"          the value of each tensor that the layer gets; null for one that it does not read
///   "tensors"         [name, value] for each parameter, buffer and constant
///   "pops", "peeks"   [name, value] for each skip that the layer reads
///   "stashes"         [name, argument] for each skip that it makes, after the calls
///   "shapes"          the shape of each input, in which null stands for any size; null for an input that must be null
///   "guards"          [number, text] for each condition of the inputs' sizes
///   "calls"           objects with these members:
///     "operator"      such as "aten::add.Tensor"; or "python", such as "module:function"
///     "args"          arguments by position; the schema's defaults follow
///     "kwargs"        arguments by name
///     "result"        the value of the result; of several results, the list of them
///     "mode"          whether the layer must be in training mode, if the call runs in one mode only
///     "within"        the objects {"grad": bool} and {"autocast": dtype, "enabled": bool, "cache": bool} around it,
///                     each with a "block" that tells it from others with the same settings
///     "at"            the line of the model's code
///   "outputs"         an argument for each tensor that leaves
///
/// An argument is null, a boolean, a number, a text or a list; or an object: {"value": 3}, {"dtype": "float32"},
/// {"layout": "strided"}, {"memory format": "channels_last"}, {"device": null} for the layer's device,
/// {"float": "inf"}, {"complex": [1, 2]}, {"training": argument, "evaluation": argument}, or
/// {"size": number}. A number there is an integer, a float, {"size": [value, dimension]}, or a list of a rule and its
/// operands, such as ["//", {"size": [0, 1]}, 2]. Rules: + * / // % ** min max < <= == != and or floor ceil trunc round
/// float sqrt exp log.
class Graph {
 public:
  /// Calls a Python function. Called on the thread that runs the graph.
  using CallPython = std::function<c10::IValue(const std::string& function, std::vector<c10::IValue> arguments)>;

  /// What a graph uses of its layer, in the order of the description.
  struct State {
    std::vector<at::Tensor> tensors = {};
    bool training = false;
    std::vector<SkipKey> pops = {};
    std::vector<SkipKey> peeks = {};
    std::vector<SkipKey> stashes = {};
  };

  /// Errors: std::invalid_argument for what is not a valid description, for an operator that this torch does not have,
  /// and for a Python function without `call_python`.
  explicit Graph(const std::string& description, CallPython call_python = {});
  ~Graph();
  Graph(const Graph&) = delete;

  const std::vector<std::string>& tensors() const;
  const std::vector<std::string>& pops() const;
  const std::vector<std::string>& peeks() const;
  const std::vector<std::string>& stashes() const;
  /// The Python functions that it calls.
  const std::vector<std::string>& python_functions() const;

  /// Returns the inputs with an undefined tensor for each that must be null.
  std::vector<at::Tensor> with_constants(std::vector<at::Tensor> tensors) const;

  /// Computes the outputs. A tensor that a mode lacks is undefined. Errors: std::invalid_argument for inputs of a wrong
  /// number, shape or size; what the operators throw, with the line of the model's code.
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, const State& state) const;

  struct Description;  // of this folder

 private:
  const std::unique_ptr<const Description> description_;
};

}  // namespace gpipe
