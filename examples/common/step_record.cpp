#include "examples/common/step_record.h"

#include <ostream>
#include <string>

#include "absl/strings/str_join.h"
#include "balance/report.h"
#include "balance/trial.h"
#include "examples/common/files.h"
#include "examples/common/processes.h"

namespace gpipe::examples {
namespace {

constexpr std::int64_t kWarmSteps = 2;

}  // namespace

void StepRecord::begin(GPipe& pipe, bool whole, bool last) {
  whole_ = whole;
  timed_ = whole && count_ >= kWarmSteps;
  timeline_ = !traced_ && (timed_ || last) ? std::make_shared<Timeline>() : nullptr;
  pipe->trace(timeline_);
  start_ = Clock::now();
}

void StepRecord::end(GPipe& pipe) {
  const auto seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  ++count_;
  if (!timeline_) {
    if (timed_) seconds_.push_back(seconds);
    return;
  }
  traced_ = true;
  const auto timeline = pipe->gather(*timeline_);
  if (!is_first(pipe->options().ranks())) return;
  if (whole_) bytes_ = timeline.peak_bytes();
  if (!trace_.empty()) write_file(trace_, to_chrome_json(timeline));
}

void StepRecord::print(std::ostream& out, const std::optional<Prediction>& prediction) const {
  if (!seconds_.empty()) {
    out << "measured step, forward and backward: " << seconds_to_text(median(seconds_)) << " (median of "
        << seconds_.size() << ")";
    if (prediction) out << "; predicted: " << seconds_to_text(prediction->seconds);
    out << std::endl;
  }
  if (!bytes_.empty()) {
    const auto add_bytes = [](std::string* text, std::int64_t bytes) { text->append(bytes_to_text(bytes)); };
    out << "peak memory per worker, without model and optimizer: " << absl::StrJoin(bytes_, ", ", add_bytes);
    if (prediction) out << "; predicted: " << absl::StrJoin(prediction->timeline.peak_bytes(), ", ", add_bytes);
    out << std::endl;
  }
}

}  // namespace gpipe::examples
