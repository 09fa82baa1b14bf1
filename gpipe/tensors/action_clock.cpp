#include "gpipe/tensors/action_clock.h"

#include "gpipe/base/clock.h"

namespace gpipe {

void ActionClock::start() { actions_.push_back({record_timed_event(device_), nullptr}); }

void ActionClock::end() { actions_.back().end = record_timed_event(device_); }

void ActionClock::stop() {
  record_timed_event(device_)->synchronize();
  stopped_ = now();
  auto last = record_timed_event(device_);  // just after `stopped_`, so that no time comes out too late
  last->synchronize();
  last_ = std::move(last);
}

void ActionClock::place(Span& span) {
  if (!last_) return;
  const auto time_of = [&](const StreamEvent& event) { return stopped_ - event->elapsedTime(*last_) * 1e-3; };
  const auto& [start, end] = actions_[placed_++];
  span.start = time_of(start);
  span.end = time_of(end);
}

}  // namespace gpipe
