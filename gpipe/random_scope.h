#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "gpipe/api.h"

namespace gpipe {

/// For its lifetime, random draws on this thread that are given no generator (dropout, rand, ...) come from a stream of
/// numbers that depends only on (seed, layer, micro_batch). A pipeline opens one around each layer of each micro-batch,
/// in the forward and in the recompute. Open one to get the same numbers from an unpartitioned model:
///
///   const auto seed = gpipe::RandomScope::draw_seed();
///   { gpipe::RandomScope scope(seed, /*layer=*/2, /*micro_batch=*/0); y = dropout->forward(x); }
///
/// Some operators cannot be given a generator: on CUDA (dropout, attention), and on the CPU under a Python dispatch
/// mode. For these the device's default generator gets the scope's state for the call, under a lock.
/// Draws that other threads make from it meanwhile, outside of scopes, do not advance its state.
///
/// Scopes nest. Each belongs to the thread that made it. Draws in traced or functionalized code are left alone.
class GPIPE_API RandomScope {
 public:
  RandomScope(std::uint64_t seed, std::int64_t layer, std::int64_t micro_batch);
  ~RandomScope();
  RandomScope(const RandomScope&) = delete;

  /// Draws a mini-batch's 64-bit seed from the current scope, or from the default CPU generator outside of scopes.
  static std::uint64_t draw_seed();

  /// The calling thread's innermost scope, or nullptr.
  static RandomScope* current();

  /// Returns this scope's generator for a device, made at the first call.
  at::Generator generator(c10::Device device);

  /// Runs `call` while the device's default generator has this scope's state. Does not intercept draws inside.
  void lend_default_generator(c10::Device device, const std::function<void()>& call);
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
