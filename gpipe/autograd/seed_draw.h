#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace gpipe {

/// The seed of one mini-batch, drawn from the default generator (or the current RandomScope). A failed forward returns
/// the draw, so that the generator's state is as before the call.
class SeedDraw {
 public:
  SeedDraw();

  std::uint64_t seed() const { return seed_; }

  /// Restores the generator's state, unless another draw followed. Allocates no tensor, because memory may be exhausted.
  void undo() noexcept;

 private:
  at::Generator before_;
  std::uint64_t seed_;
};

}  // namespace gpipe
