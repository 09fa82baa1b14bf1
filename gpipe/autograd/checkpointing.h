#pragma once

#include "gpipe/tensors/parcel.h"

namespace gpipe {

struct Stage;

/// The inputs of a checkpointed cell, stored from its forward until its recompute. Stores copies where the stage, or a
/// later one with the same memory, changes its inputs in place, and until the first backward has shown that none does.
class StoredInputs {
 public:
  /// Call before the forward. `stage` must outlive this.
  StoredInputs(Stage& stage, const std::vector<Parcel>& inputs);

  /// Call after the forward and after the recompute, with the inputs that the pass got. Errors: std::runtime_error if
  /// they were changed in place and no copies are stored, as they are from then on; `when` ends its message.
  void check_unchanged(const std::vector<Parcel>& inputs, const std::string& when);

  /// Returns the inputs of a recompute. With `retain_graph` they can be taken again. Errors: std::runtime_error when
  /// they were changed in place since the forward.
  std::vector<Parcel> take(bool retain_graph);

  /// Call before the backward, when all later stages have run their forward of the micro-batch, maybe during the
  /// recompute. Errors: std::runtime_error when the inputs of the recompute were changed in place meanwhile.
  void check_before_backward();

 private:
  Stage& stage_;
  const bool stores_copies_;
  std::vector<Parcel> stored_;
  std::vector<VersionWatch> originals_;  // until the first backward
};

/// Remembers which outputs of a checkpointed stage need gradients, which only the graph of its first forward shows.
/// Used by one thread at a time.
class NeededGradients {
 public:
  /// Whether the last learn() had the same sources: for each parameter and input, whether it wants a gradient.
  bool knows(const std::vector<bool>& sources) const { return sources == sources_ && !wanted_.empty(); }
  /// Learns from the result of a forward that built its graph.
  void learn(std::vector<bool> sources, const std::vector<Parcel>& out);
  /// Sets `wants_gradient` in the result of a forward without a graph.
  void apply(std::vector<Parcel>& out) const;
  /// Compares the result of a recompute with `sent`, the wants_gradient of the forward's parcels. Errors:
  /// std::runtime_error when a tensor needs a gradient but was not sent so. From then on every floating-point output is
  /// taken to need one.
  void check(const std::vector<std::vector<bool>>& sent, const std::vector<Parcel>& recomputed);

 private:
  std::vector<bool> sources_;
  std::vector<std::vector<bool>> wanted_;  // per parcel and tensor
  bool varies_ = false;                    // differs between calls: all floating-point outputs need gradients
};

}  // namespace gpipe
