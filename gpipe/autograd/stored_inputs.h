#pragma once

#include <string>
#include <vector>

#include "gpipe/autograd/stage.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {

/// The inputs of a checkpointed cell, stored from its forward until its recompute. Stores copies where the stage, or a
/// later one that gets the same memory, changes its inputs in place, and until the first backward has shown that none
/// does. Used by one thread at a time.
class StoredInputs {
 public:
  /// Call before the forward. `stage` must outlive this.
  StoredInputs(Stage& stage, const std::vector<Parcel>& inputs);

  /// Call after the forward and after the recompute, with the inputs that the pass got. `when` ends the message. Errors:
  /// std::runtime_error if they were changed in place and no copies are stored. The stage stores copies from then on.
  void check_unchanged(const std::vector<Parcel>& inputs, const std::string& when);

  /// Returns the inputs of a recompute. With `retain_graph` they can be taken again. Errors: std::runtime_error when they
  /// were changed in place since the forward.
  std::vector<Parcel> take(bool retain_graph);

  /// Call before the backward, when all later stages have run their forward of the micro-batch. Their forwards may run
  /// during the recompute. Errors: std::runtime_error when the inputs of the recompute were changed in place meanwhile.
  void check_before_backward();

 private:
  Stage& stage_;
  const bool stores_copies_;
  std::vector<Parcel> stored_;
  std::vector<VersionWatch> originals_;  // until the first backward
};

}  // namespace gpipe
