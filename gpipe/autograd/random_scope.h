#pragma once

#include <ATen/core/MT19937RNGEngine.h>

#include "gpipe/random_scope.h"

namespace gpipe {

/// A seed as of RandomScope::draw_seed(), which a failed call gives back.
class SeedDraw {
 public:
  SeedDraw();

  std::uint64_t seed() const { return seed_; }

  /// Restores the generator's state, unless another draw followed. Allocates no tensor: memory may be exhausted.
  void undo() noexcept;

 private:
  at::mt19937 before_;
  at::mt19937 after_;
  std::uint64_t seed_ = 0;
};

}  // namespace gpipe
