#include "gpipe/run/worker_scope.h"

#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>

#include "gpipe/base/clock.h"
#include "gpipe/intraop.h"

namespace gpipe {

CallerStateScope::CallerStateScope(const at::ThreadLocalState& state) : guard_(state) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

WorkerScope::WorkerScope(const Pipeline& pipeline, int worker, const at::ThreadLocalState& state,
                         const ByteCounter* counter)
    : state_(state), stream_(pipeline.stream_of_worker(worker)), counted_(counter, worker) {
  if (const auto& enter = pipeline.binding().enter_worker) enter();
  // A cached cast would join the graphs of two cells.
  at::autocast::set_autocast_cache_enabled(false);
  if (pipeline.device_of_worker(worker).is_cpu()) set_intraop_threads_of_this_thread(pipeline.intraop_threads());
}

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

WorkerEvents::WorkerEvents(const Pipeline& pipeline, bool times)
    : pipeline_(pipeline), times_(times), end_(pipeline.workers()), clocks_(pipeline.workers()) {
  for (int w = 0; w < pipeline.workers(); ++w) begin_.push_back(record_event(pipeline.device_of_worker(w)));
}

void WorkerEvents::begin(int worker) {
  const auto device = pipeline_.device_of_worker(worker);
  wait(begin_[worker], device);
  if (times_ && !device.is_cpu()) clocks_[worker].emplace(device);
}

void WorkerEvents::end(int worker, const std::vector<c10::Device>& others) {
  if (clocks_[worker]) clocks_[worker]->stop();
  end_[worker] = {record_event(pipeline_.device_of_worker(worker))};
  for (const auto other : others) end_[worker].push_back(record_event(other));
}

void WorkerEvents::await_workers(const std::vector<c10::Device>& devices) const {
  for (const auto device : devices) {
    for (const auto& end : end_) wait(end, device);
  }
}

void WorkerEvents::place_spans(Timeline& timeline, std::size_t first) {
  for (std::size_t i = first; i < timeline.spans.size(); ++i) {
    auto& span = timeline.spans[i];
    if (auto& clock = clocks_[span.worker]) clock->place(span);
  }
}

}  // namespace gpipe
