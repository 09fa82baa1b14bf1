#include "gpipe/runtime/action_clock.h"

#include <chrono>

namespace gpipe {

void ActionClock::start() { actions_.push_back({record_timed_event(device_), nullptr}); }

void ActionClock::end() { actions_.back().end = record_timed_event(device_); }

void ActionClock::stop() {
  auto last = record_timed_event(device_);
  last->synchronize();
  stopped_ = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
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
