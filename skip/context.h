#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "skip/namespace.h"

namespace gpipe {

/// The identity of a skip.
struct SkipKey {
  Namespace ns = Namespace::global();
  std::string name;

  friend auto operator<=>(const SkipKey&, const SkipKey&) = default;
};

/// "'name'", or "'name' (namespace 3)" for one that was isolated: for messages.
std::string to_string(const SkipKey& key);

/// Where the calling thread's stash() and pop() lead. A pipeline sets one around each cell. Outside a pipeline a
/// context of the thread's own serves, so that skippable layers work in a plain Sequential too. That one keeps a
/// stashed tensor until it is popped, or until the same key is stashed again: a forward that failed in between does no
/// harm to the next. Its pop() of what is not there is a std::runtime_error.
class SkipContext {
 public:
  virtual ~SkipContext() = default;

  virtual void stash(const SkipKey& key, at::Tensor tensor) = 0;
  virtual at::Tensor pop(const SkipKey& key) = 0;

  /// The calling thread's.
  static SkipContext& current();
};

/// Makes a context current on this thread for a scope. Scopes nest. The context must outlive the guard, and the guard
/// must be destroyed on the thread that made it.
class SkipContextGuard {
 public:
  explicit SkipContextGuard(SkipContext& context);
  ~SkipContextGuard();
  SkipContextGuard(const SkipContextGuard&) = delete;
  SkipContextGuard& operator=(const SkipContextGuard&) = delete;

 private:
  SkipContext* previous_;
};

}  // namespace gpipe
