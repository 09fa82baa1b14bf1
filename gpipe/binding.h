#pragma once

#include <exception>
#include <functional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/error_info.h"

namespace gpipe {

/// The functions that a binding for another language adds to a pipeline. Each can be empty.
struct LanguageBinding {
  /// Runs the layers of a stage, one function per stage. Empty: the pipeline calls Layer::forward().
  std::vector<RunLayers> run_layers = {};
  /// Calls a function while this thread holds the lock that the layers' objects need. Must be reentrant.
  std::function<void(absl::FunctionRef<void()>)> lock = {};
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
