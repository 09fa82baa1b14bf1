#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>

#include <optional>

#include "gpipe/run/pipeline.h"
#include "gpipe/tensors/byte_counter.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {

/// Gives this thread another thread's state (grad mode, autocast, dispatch modes, hooks) for its lifetime, with the
/// autograd engine's multithreading off.
class CallerStateScope {
 public:
  explicit CallerStateScope(const at::ThreadLocalState& state);

 private:
  at::ThreadLocalStateGuard guard_;
};

/// Runs a backward without gradients of its own, and with `state` unless that is empty, for its lifetime.
class BackwardScope {
 public:
  explicit BackwardScope(const std::optional<at::ThreadLocalState>& state) {
    if (state) state_.emplace(*state);
    no_grad_.emplace();
  }

 private:
  std::optional<CallerStateScope> state_;
  std::optional<at::NoGradGuard> no_grad_;
};

/// Prepares a worker's thread for its part of a mini-batch, for its lifetime: sets the caller's state, the worker's stream,
/// the number of intra-op threads and the byte counter, and turns the autocast cache off.
class WorkerScope {
 public:
  /// `counter` may be null.
  WorkerScope(const Pipeline& pipeline, int worker, const at::ThreadLocalState& state, const ByteCounter* counter);

 private:
  CallerStateScope state_;
  OptionalStreamScope stream_;
  ByteCounter::Worker counted_;
};

}  // namespace gpipe
