#pragma once

#include <exception>
#include <string>

#include "gpipe/action.h"
#include "gpipe/api.h"

namespace gpipe {

/// Where an exception of a forward or backward came from.
struct ErrorInfo {
  Action action;           ///< kind, stage and micro-batch
  int layer = -1;          ///< index in the model; the number of layers for the loss; -1 in a backward
  std::string layer_name;  ///< the Sequential's name of the layer; "loss"; empty in a backward
  std::string message;     ///< the exception's what() without a backtrace, or "unknown"
};

/// "0F1 (stage 0, micro-batch 1, layer 'conv')".
GPIPE_API std::string to_string(const ErrorInfo& info);

/// The what() of an exception without a backtrace, or "unknown".
GPIPE_API std::string message_of(const std::exception_ptr& error);

}  // namespace gpipe
