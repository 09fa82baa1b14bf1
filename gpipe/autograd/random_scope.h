#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"

namespace gpipe {

/// For its lifetime, random draws on this thread that name no generator of their own (dropout, rand, bernoulli_,
/// normal_, ...) come from a stream that depends on (seed, layer, micro_batch) alone. A pipeline opens one around each
/// layer of each micro-batch, in the forward and again in the recompute; so may anyone who wants the same numbers of an
/// unpartitioned model:
///
///   const auto seed = gpipe::RandomScope::draw_seed();
///   { gpipe::RandomScope scope(seed, /*layer=*/2, /*micro_batch=*/0); y = dropout->forward(x); }
///
/// Operators without a generator argument draw from their device's default generator: on CUDA (dropout, attention), and
/// on the CPU below a dispatch mode of Python's. It is lent the scope's stream under a lock for the call and given back
/// its own; what other threads draw from it meanwhile, outside of scopes, is lost.
///
/// Scopes nest; each belongs to the thread that made it. A scope costs nothing until its first draw. While code is
/// traced or functionalised draws are left alone.
class RandomScope {
 public:
  RandomScope(std::uint64_t seed, std::int64_t layer, std::int64_t micro_batch);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

  /// One 64-bit draw from the default CPU generator, or, inside a scope, from the scope: the seed of a mini-batch.
  static std::uint64_t draw_seed();

  /// The calling thread's innermost scope, or nullptr.
  static RandomScope* current();

  /// This scope's generator on a device, made at the first call for that device.
  at::Generator generator(c10::Device device);

  /// Runs `call` with a device's default generator lent to this scope; draws inside it are left alone.
  void lend_default_generator(c10::Device device, absl::FunctionRef<void()> call);
  bool lending() const { return lending_; }

 private:
  std::uint64_t key_;
  std::optional<at::Generator> cpu_;
  std::vector<at::Generator> accelerators_;
  bool lending_ = false;
  RandomScope* previous_;
  c10::impl::IncludeDispatchKeyGuard intercept_;
};

}  // namespace gpipe
