#include "examples/common/step_record.h"

#include <sys/ioctl.h>
#include <torch/cuda.h>
#include <torch/utils.h>
#include <unistd.h>

#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "balance/report.h"

namespace gpipe::examples {
namespace {

// Returns the seconds of all actions.
double work_of(const Timeline& timeline) {
  double seconds = 0;
  for (const auto& span : timeline.spans) seconds += span.end - span.start;
  return seconds;
}

}  // namespace

void StepRecord::begin(GPipe& pipe) {
  ++count_;
  timeline_->spans.clear();
  timeline_->layers.clear();
  pipe->trace(traces() ? timeline_ : nullptr);
  start_ = Clock::now();
}

void StepRecord::end(GPipe& pipe, bool whole) {
  for (const auto& device : pipe->devices()) {
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
  }
  if (whole && count_ > 2) seconds_.push_back(seconds_since(start_));
  if (!traces()) return;
  gathered_ = pipe->team().gather(*timeline_);
  if (count_ != 2 || gathered_.spans.empty()) return;
  bytes_ = gathered_.peak_bytes();
  work_ = work_of(gathered_);
}

void StepRecord::show(double loss, std::int64_t samples) {
  if (!watches_ || gathered_.spans.empty()) return;
  const double seconds = seconds_since(start_);
  auto line = absl::StrFormat("step %d: %s, loss %.4g, %.4g samples/s", count_, seconds_to_text(seconds), loss,
                              static_cast<double>(samples) / seconds);
  winsize size{};
  const bool is_terminal = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  std::cerr << watch_.show(gathered_, std::move(line), is_terminal ? size.ws_col - 1 : 0);
}

void StepRecord::print(const std::optional<Prediction>& prediction) const {
  if (seconds_.empty()) return;
  const auto add = [](std::string* text, std::int64_t bytes) { text->append(bytes_to_text(bytes)); };
  const auto to_text = [&](double seconds, const std::vector<std::int64_t>& bytes) {
    return absl::StrCat(seconds_to_text(seconds), ", peak memory per worker ", absl::StrJoin(bytes, ", ", add));
  };
  const auto measured = torch::tensor(seconds_).median().item<double>();
  std::cout << "measured step: " << to_text(measured, bytes_) << ", without model and optimizer\n";
  if (!prediction) return;
  std::cout << "predicted: " << to_text(prediction->seconds, prediction->timeline.peak_bytes()) << "\n";
  if (std::abs(measured / prediction->seconds - 1) <= 0.05) return;
  std::cout << "they differ: the actions of all workers took " << seconds_to_text(work_) << " in a traced step, and "
            << seconds_to_text(work_of(prediction->timeline))
            << " when the model was measured; other programs and shared caches change this\n";
}

}  // namespace gpipe::examples
