#pragma once

#include <exception>
#include <functional>
#include <vector>

#include "gpipe/error_info.h"
#include "gpipe/layer.h"

namespace gpipe {

/// Data that a language binding keeps for a cell from its forward until its recompute.
using CellMemo = std::shared_ptr<void>;

/// A parameter that another stage lends to this one, and what stands for it in a cell, on this stage's device.
struct Borrowed {
  at::Tensor parameter;
  at::Tensor stand_in;
};

/// Runs the layers of a stage in order. Must call `begin` with each layer's index in the stage before running it.
/// `memo` is null in a cell's forward; the recompute gets what the forward stored there. Layers must use the stand-in
/// of a parameter on another device, and may use other parameters directly.
using RunLayers = std::function<Value(Value input, const std::function<void(int layer)>& begin, CellMemo& memo,
                                      const std::vector<Borrowed>& borrowed)>;

/// The functions that a binding for another language adds to a pipeline. Each can be empty.
struct LanguageBinding {
  /// Runs the layers of a stage, one function per stage. Empty: the pipeline calls Layer::forward().
  std::vector<RunLayers> run_layers = {};
  /// Calls a function while this thread holds the lock that the layers' objects need. Must be reentrant.
  std::function<void(const std::function<void()>&)> lock = {};
  /// Called on each worker before its part of a forward, backward or step.
  std::function<void()> enter_worker = {};
  /// Called at intervals on the thread that waits in a call. An exception from it ends the call.
  std::function<void()> poll = {};
  /// Called on the worker with each error that ends an action. May throw another error instead.
  std::function<void(const ErrorInfo&, const std::exception_ptr&)> on_error = {};
  /// The place of each parameter of the whole model, in the order of the layers, in the user's model: the order of sums
  /// over parameters. Empty: that of the layers.
  std::vector<std::size_t> parameter_places = {};
  /// Lets the structures of the layers' objects cross to other ranks.
  StructureCodec structures = {};
};

}  // namespace gpipe
