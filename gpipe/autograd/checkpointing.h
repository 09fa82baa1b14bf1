#pragma once

namespace gpipe {

/// Whether the calling thread runs a layer's forward that will be recomputed. Grad mode may be enabled: a stage's first
/// such forward builds its graph.
bool is_checkpointing();

/// Whether the calling thread recomputes a layer's forward. A layer that counts its calls should not count this one.
bool is_recomputing();

/// Sets what is_checkpointing() and is_recomputing() return on this thread, for its lifetime.
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
