#pragma once

#include "balance/profile.h"
#include "balance/run_options.h"
#include "gpipe/api.h"

namespace gpipe {

/// Predicted cost of forward, backward, and sums of gradients over replicas, without the loss and the optimizer.
struct PredictedStep {
  std::vector<std::int64_t> balance;
  std::vector<int> placement;  ///< the worker of each stage
  double seconds = 0;          ///< of the whole step
  double reduction = 0;        ///< the part of `seconds` after the last backward, until all gradients are summed
  double bubble = 0;           ///< idle time / (workers x seconds), in [0, 1)
  /// Peak bytes per worker: parameters, gradients, optimizer, buffers, activations, and reduction_bytes().
  std::vector<std::int64_t> bytes = {};
  /// Bytes of activations and skips that go to another worker in the forward of one mini-batch. As many come back.
  std::int64_t crossing = 0;
};

struct Prediction : PredictedStep {
  std::vector<double> stages = {};  ///< seconds per stage for one micro-batch, with whole backwards and without waiting
  Timeline timeline = {};           ///< of the simulation; its bytes exclude what stays during the step
  Schedule lists = {};              ///< of each worker, without recomputes
};

class StageCost;

/// Simulates the program that GPipe would run, with the profile's costs. Errors: std::invalid_argument for a balance
/// that does not sum to the number of layers, for invalid options, and for a schedule that does not fit.
GPIPE_API Prediction predict(const Profile& profile, const std::vector<std::int64_t>& balance,
                             const RunOptions& options = {});
Prediction predict(const StageCost& cost, const std::vector<std::int64_t>& balance, const RunOptions& options);

}  // namespace gpipe
