#pragma once

#include <optional>

#include "balance/predict.h"
#include "balance/stage_cost.h"
#include "gpipe/schedule_source.h"

namespace gpipe {

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
