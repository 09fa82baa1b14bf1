#pragma once

#include <cstdint>
#include <vector>

#include "balance/profile.h"
#include "balance/stage_cost.h"
#include "gpipe/schedule/timeline.h"

namespace gpipe {

/// What a step will cost: a forward and backward of one mini-batch, without loss and optimizer.
struct Prediction {
  std::vector<std::int64_t> balance;  ///< of which it is
  double seconds = 0;
  double bubble = 0;                ///< idle time / (workers x seconds), in [0, 1)
  std::vector<double> stages = {};  ///< seconds of each stage's actions for one micro-batch, forward to backward
  /// Most in use at once, per stage: parameters, gradients, buffers, what the optimizer keeps, activations.
  std::vector<std::int64_t> bytes;
  Timeline timeline;  ///< what the simulator ran; its bytes are those above what is always there
};

/// Simulates the program that a GPipe would run, with the profile's costs. Errors: std::invalid_argument for a balance
/// that does not cut the profile's layers, or chunks < 1.
Prediction predict(const Profile& profile, const std::vector<std::int64_t>& balance, const RunOptions& options = {});

}  // namespace gpipe
