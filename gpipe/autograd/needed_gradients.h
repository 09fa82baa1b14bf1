#pragma once

#include <vector>

#include "gpipe/tensors/parcel.h"

namespace gpipe {

/// Remembers which outputs of a checkpointed stage need gradients. Only a graph shows that a layer detaches, so the
/// stage's first forward builds its graph, and later forwards use its answer. Used by one thread at a time.
class NeededGradients {
 public:
  /// Whether the last learn() had the same sources. `sources` tells for each parameter and input whether it wants a
  /// gradient.
  bool knows(const std::vector<bool>& sources) const { return sources == sources_ && !wanted_.empty(); }
  /// Learns from the result of a forward that built its graph.
  void learn(std::vector<bool> sources, const std::vector<Parcel>& out);
  /// Sets `wants_gradient` in the result of a forward without a graph.
  void apply(std::vector<Parcel>& out) const;
  /// Compares the result of a recompute with `sent`, the wants_gradient of the forward's parcels. Errors: std::runtime_error
  /// when a tensor needs a gradient but was not sent so. From then on every floating-point output is taken to need one.
  void check(const std::vector<std::vector<bool>>& sent, const std::vector<Parcel>& recomputed);

 private:
  std::vector<bool> sources_;
  std::vector<std::vector<bool>> wanted_;  // per parcel and tensor
  bool varies_ = false;                    // differs between calls: all floating-point outputs need gradients
};

}  // namespace gpipe
