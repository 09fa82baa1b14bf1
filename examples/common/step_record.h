#pragma once

#include <chrono>
#include <optional>

#include "balance/predict.h"
#include "gpipe/gpipe.h"
#include "gpipe/watch.h"

namespace gpipe::examples {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Times steps of whole mini-batches, and traces the second of all steps, after one that warms up. With `watches`,
/// traces and shows every step.
class StepRecord {
 public:
  explicit StepRecord(bool watches) : watches_(watches) {}

  void begin(GPipe& pipe);
  void end(GPipe& pipe, bool whole);
  /// Shows the step on standard error, if wanted.
  void show(double loss, std::int64_t samples);
  void print(const std::optional<Prediction>& prediction) const;

 private:
  bool traces() const { return watches_ || count_ == 2; }

  const bool watches_;
  int count_ = 0;
  Clock::time_point start_;
  const std::shared_ptr<Timeline> timeline_ = std::make_shared<Timeline>();
  Timeline gathered_;  // from all processes; empty except in the first
  Watch watch_;
  std::vector<double> seconds_;
  std::vector<std::int64_t> bytes_;  // per worker, the most of the second step
  double work_ = 0;                  // seconds of its actions
};

}  // namespace gpipe::examples
