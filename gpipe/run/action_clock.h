#pragma once

#include <utility>
#include <vector>

#include "gpipe/base/clock.h"
#include "gpipe/tensors/transfer.h"
#include "gpipe/timeline.h"

namespace gpipe {

/// Times the actions of one worker on its device by events, so that the host need not wait for each.
class ActionClock {
 public:
  explicit ActionClock(c10::Device device) : device_(device) {}

  /// Call it after the waits for an action's inputs.
  void start() { actions_.emplace_back(record_timed_event(device_), nullptr); }
  void end() { actions_.back().second = record_timed_event(device_); }

  /// Waits for the device's stream. Call it after the last action.
  void stop() {
    record_timed_event(device_)->synchronize();
    stopped_ = now();
    auto last = record_timed_event(device_);  // just after `stopped_`, so that no time comes out too late
    last->synchronize();
    last_ = std::move(last);
  }

  /// Sets the times of the next action's span. Does nothing before stop().
  void set_times(Span& span) {
    if (!last_) return;
    const auto time_of = [&](const StreamEvent& event) { return stopped_ - event->elapsedTime(*last_) * 1e-3; };
    const auto& [start, end] = actions_[next_++];
    span.start = time_of(start);
    span.end = time_of(end);
    span.lead = span.queued = span.blocked = 0;
  }

 private:
  const c10::Device device_;
  std::vector<std::pair<StreamEvent, StreamEvent>> actions_;  // start and end
  std::size_t next_ = 0;
  StreamEvent last_;
  double stopped_ = 0;  // the host's time at `last_`, in seconds
};

}  // namespace gpipe
