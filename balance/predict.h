#pragma once

#include "balance/stage_cost.h"
#include "gpipe/schedule/schedule_source.h"

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
};

/// Simulates the program that GPipe would run, with the profile's costs. Errors: std::invalid_argument for a balance
/// that does not sum to the number of layers, for invalid options, and for a schedule that does not fit.
Prediction predict(const Profile& profile, const std::vector<std::int64_t>& balance, const RunOptions& options = {});

/// Predicts balances of one number of stages. Keeps what they share, such as the program. Used by one thread at a time.
class Predictor {
 public:
  /// The profile must outlive this. Errors: as predict().
  Predictor(const Profile& profile, int stages, RunOptions options);

  /// As gpipe::predict(). REQUIRES: the balance has the number of stages.
  Prediction predict(const std::vector<std::int64_t>& balance);

 private:
  Costs costs(const std::vector<std::int64_t>& balance, const StageCost::SizedEdges& stage_edges) const;
  /// Bytes per worker that stay during a step: parameters, buffers, optimizer state, and reduction_bytes().
  std::vector<std::int64_t> static_bytes(const std::vector<std::int64_t>& balance) const;
  bool crosses(const Edge& edge) const;
  /// When the gradients of all stages are summed over the replicas.
  double reduced(const std::vector<int>& ends, const Timeline& timeline) const;
  const Program& program(const Layout& layout, const std::vector<Edge>& edges);

  const StageCost stage_;
  const RunOptions options_;
  const ScheduleSource source_;
  std::optional<Program> program_;  // the last one
};

}  // namespace gpipe
