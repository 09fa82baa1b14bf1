#include "gpipe/run/worker_events.h"

namespace gpipe {

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
