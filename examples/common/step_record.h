#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <memory>
#include <optional>
#include <vector>

#include "balance/predict.h"
#include "gpipe/gpipe.h"
#include "gpipe/timeline.h"

namespace gpipe::examples {

/// Measures steps, forward and backward with the loss, and traces one of them. The first two steps are not
/// measured, because they warm up memory and caches. Not synchronised.
class StepRecord {
 public:
  /// Writes the timeline of the traced step to `trace`, unless that is empty.
  explicit StepRecord(std::filesystem::path trace) : trace_(std::move(trace)) {}

  /// Begins a step. Only steps of `whole` mini-batches are measured. The `last` step is traced if no other was.
  void begin(GPipe& pipe, bool whole, bool last);
  /// Ends it. Over ranks, the first process records the spans of all. Errors: std::runtime_error if the timeline cannot be
  /// written.
  void end(GPipe& pipe);

  /// Whether the timeline has been written, over ranks by rank 0.
  bool wrote_trace() const { return traced_ && !trace_.empty(); }

  /// Prints what a step took, next to the prediction.
  void print(std::ostream& out, const std::optional<Prediction>& prediction) const;

 private:
  using Clock = std::chrono::steady_clock;

  const std::filesystem::path trace_;
  std::int64_t count_ = 0;
  bool whole_ = false;  // of the current step
  bool timed_ = false;
  Clock::time_point start_;
  std::shared_ptr<Timeline> timeline_;

  bool traced_ = false;
  std::vector<double> seconds_;
  std::vector<std::int64_t> bytes_;  // per worker, the most of the traced step
};

}  // namespace gpipe::examples
