#pragma once

#include <vector>

#include "gpipe/autograd/parcel.h"

namespace gpipe {

/// Which outputs of a stage need gradients. Only a graph tells: a forward without one cannot see that a layer detaches.
/// So the first forward of a stage whose cells are recomputed builds its graph, once, and is remembered here. Used by
/// one thread at a time.
class GradientFlow {
 public:
  /// Whether a forward was learned from in which the same parameters and inputs wanted gradients.
  bool knows(const std::vector<bool>& sources) const { return sources == sources_ && !wanted_.empty(); }
  /// Learns from what a forward that built its graph has returned.
  void learn(std::vector<bool> sources, const std::vector<Parcel>& out);
  /// Marks what a forward without a graph has returned.
  void apply(std::vector<Parcel>& out) const;
  /// Compares a recompute, which built the graph, with what the forward sent. Errors: std::runtime_error when a tensor
  /// needs a gradient that was not asked for; the stage then learns anew.
  void check(const std::vector<std::vector<bool>>& sent, const std::vector<Parcel>& recomputed);

 private:
  std::vector<bool> sources_;
  std::vector<std::vector<bool>> wanted_;  // parcel by parcel
  bool varies_ = false;                    // differs from call to call: all floating tensors are asked for
};

}  // namespace gpipe
