#pragma once

namespace gpipe {

/// Whether the calling thread runs a layer whose forward will be recomputed. Grad mode does not tell: the first such
/// forward of a stage builds its graph, to learn which outputs need gradients, and drops it.
bool is_checkpointing();

/// Whether the calling thread recomputes a layer's forward, before its backward. A layer that counts its calls, or
/// writes somewhere, need not do so again.
bool is_recomputing();

/// What the layers that this thread runs are run for, during its lifetime.
class PassScope {
 public:
  enum class Pass { kPlain, kCheckpointing, kRecomputing };

  explicit PassScope(Pass pass);
  ~PassScope();
  PassScope(const PassScope&) = delete;
  PassScope& operator=(const PassScope&) = delete;

 private:
  const Pass before_;
};

}  // namespace gpipe
