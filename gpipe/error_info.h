#pragma once

#include <exception>
#include <string>

#include "gpipe/schedule/action.h"

namespace gpipe {

struct Stage;

/// Where an exception of a forward or backward came from.
struct ErrorInfo {
  Action action;           ///< kind, stage and micro-batch
  int layer = -1;          ///< index in the model; the number of layers for the loss; -1 in a backward
  std::string layer_name;  ///< the Sequential's name of the layer; "loss"; empty in a backward
  std::string message;     ///< the exception's what() without a backtrace, or "unknown"
};

/// "0F1 (stage 0, micro-batch 1, layer 'conv')".
std::string to_string(const ErrorInfo& info);

/// The what() of an exception without a backtrace, or "unknown".
std::string message_of(const std::exception_ptr& error);

/// Describes an error of an action. `layer` is the index in the stage of the layer that ran, -1 for none.
ErrorInfo describe(const std::exception_ptr& error, const Action& action, const Stage& stage, int layer);

}  // namespace gpipe
