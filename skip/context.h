#pragma once

#include <ATen/core/Tensor.h>

#include "skip/namespace.h"

namespace gpipe {

/// Implements stash() and pop() for the calling thread. A pipeline sets a context for each cell. Outside a pipeline
/// each thread has a default context, so that skippable layers also work in a plain Sequential.
///
/// The default context keeps a stashed tensor until it is popped or until the same key is stashed again, so a failed
/// forward does not affect the next one. Its pop() throws std::runtime_error if nothing is stashed under the key.
class SkipContext {
 public:
  virtual ~SkipContext() = default;

  virtual void stash(const SkipKey& key, at::Tensor tensor) = 0;
  virtual at::Tensor pop(const SkipKey& key) = 0;

  /// Returns the calling thread's context.
  static SkipContext& current();
};

/// Makes a context current on this thread for a scope. Scopes nest.
/// REQUIRES: the context outlives the guard; the guard is destroyed on the thread that created it.
class SkipContextGuard {
 public:
  explicit SkipContextGuard(SkipContext& context);
  ~SkipContextGuard();
  SkipContextGuard(const SkipContextGuard&) = delete;

 private:
  SkipContext* const previous_;
};

}  // namespace gpipe
