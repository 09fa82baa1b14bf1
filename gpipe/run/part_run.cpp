// A run of a part of a program, by a MiniBatch.

#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <typeinfo>

#include "absl/strings/str_cat.h"
#include "gpipe/base/clock.h"
#include "gpipe/intraop.h"
#include "gpipe/run/edges.h"
#include "gpipe/run/mini_batch.h"
#include "gpipe/tensors/profiler_range.h"

namespace gpipe {
namespace {

// Times the actions of one worker on its device by events, so that the host need not wait for each.
class ActionClock {
 public:
  explicit ActionClock(c10::Device device) : device_(device) {}

  // Call it after the waits for an action's inputs.
  void start() { actions_.emplace_back(record_timed_event(device_), nullptr); }
  void end() { actions_.back().second = record_timed_event(device_); }

  // Waits for the device's stream. Call it after the last action.
  void stop() {
    record_timed_event(device_)->synchronize();
    stopped_ = now();
    auto last = record_timed_event(device_);  // just after `stopped_`, so that no time comes out too late
    last->synchronize();
    last_ = std::move(last);
  }

  // Sets the times of the next action's span. Does nothing before stop().
  void place(Span& span) {
    if (!last_) return;
    const auto time_of = [&](const StreamEvent& event) { return stopped_ - event->elapsedTime(*last_) * 1e-3; };
    const auto& [start, end] = actions_[placed_++];
    span.start = time_of(start);
    span.end = time_of(end);
  }

 private:
  const c10::Device device_;
  std::vector<std::pair<StreamEvent, StreamEvent>> actions_;  // start and end
  std::size_t placed_ = 0;
  StreamEvent last_;
  double stopped_ = 0;  // the host's time at `last_`, in seconds
};

// Returns an exception of the same type as `error`, if that is one of Types, whose what() has the place too.
template <typename... Types>
std::exception_ptr copy_with_place(const std::exception& error, const std::string& place) {
  const auto text = absl::StrCat(error.what(), " (", place, ")");
  std::exception_ptr made;
  static_cast<void>(((typeid(error) == typeid(Types) && (made = std::make_exception_ptr(Types(text)))) || ...));
  return made;
}

// Adds the place to what() of an exception of LibTorch or the standard library. Others stay as they are.
std::exception_ptr with_place(const std::exception_ptr& error, const std::string& place) {
  std::exception_ptr made;
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& exception) {
    exception.add_context(place);
  } catch (const std::exception& exception) {
    made = copy_with_place<std::runtime_error, std::range_error, std::overflow_error, std::underflow_error,
                           std::logic_error, std::invalid_argument, std::domain_error, std::length_error,
                           std::out_of_range>(exception, place);
  } catch (...) {
  }
  return made ? made : error;
}

}  // namespace

CallerStateScope::CallerStateScope(const at::ThreadLocalState& state) : guard_(state) {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

/// Sets up the workers' threads as the caller's, orders the work on devices, carries what actions exchange, records
/// actions in a timeline, and tells of errors.
///
/// Thread safety: made, executed and destroyed on the caller's thread, within a Call.
class MiniBatch::PartRun : public ActionRunner {
 public:
  /// Notes the caller's work.
  PartRun(MiniBatch& mini_batch, Part part)
      : mini_batch_(mini_batch),
        pipeline_(*mini_batch.pipeline_),
        timeline_(mini_batch.recording_.timeline.get()),
        counter_(mini_batch.recording_.counter),
        part_(part),
        end_(pipeline_.workers()),
        clocks_(pipeline_.workers()),
        edges_(pipeline_, *mini_batch.program_, counter_, mini_batch.inputs_) {
    for (int w = 0; w < pipeline_.workers(); ++w) begin_.push_back(record_event(pipeline_.device_of_worker(w)));
  }

  void execute() {
    pipeline_.set_error(std::nullopt);  // again: another thread's call may have failed while this call waited
    const auto recorded = timeline_ ? timeline_->spans.size() : 0;
    const auto failure =
        pipeline_.executor().run(*mini_batch_.program_, part_, *this, timeline_, mini_batch_.recording_.step);
    try {
      // The caller may use any result on any device.
      await_workers(pipeline_.devices());
      await_workers(other_devices());
      for (auto i = recorded; timeline_ && i < timeline_->spans.size(); ++i) {
        auto& span = timeline_->spans[i];
        if (clocks_[span.worker]) clocks_[span.worker]->place(span);
      }
    } catch (...) {
      if (!failure) throw;  // else the device is in an error state; the first error says more
    }
    if (!failure) return;
    auto error = failure->error;
    if (failure->action) error = with_place(error, "in " + to_string(describe(*failure->action, error)));
    pipeline_.team().rethrow(error);
  }

 private:
  void on_worker(int worker, absl::FunctionRef<void()> run_actions) override {
    const CallerStateScope state(state_);
    const c10::OptionalStreamGuard stream(pipeline_.stream_of_worker(worker));
    const ByteCounter::Worker counted(counter_.get(), worker);
    start(worker);
    run_actions();
    try {
      edges_.settle(worker);
    } catch (...) {
      end(worker);
      throw;
    }
    end(worker);
  }

  void start(int worker) {
    if (const auto& enter = pipeline_.binding().enter_worker) enter();
    // A cached cast would join the graphs of two cells.
    at::autocast::set_autocast_cache_enabled(false);
    const auto device = pipeline_.device_of_worker(worker);
    if (device.is_cpu()) set_intraop_threads_of_this_thread(pipeline_.intraop_threads());
    wait(begin_[worker], device);
    if (timeline_ && !device.is_cpu()) clocks_[worker].emplace(device);
  }

  void end(int worker) {
    if (clocks_[worker]) clocks_[worker]->stop();
    end_[worker] = {record_event(pipeline_.device_of_worker(worker))};
    if (worker != pipeline_.worker_of(pipeline_.count() - 1)) return;
    for (const auto device : other_devices()) end_[worker].push_back(record_event(device));
  }

  void await_workers(const std::vector<c10::Device>& devices) const {
    for (const auto device : devices) {
      for (const auto& end : end_) wait(end, device);
    }
  }

  void run(const Action& action, Measure measure) override {
    const ProfilerRange range([&] { return "gpipe " + to_string(action); });
    auto& clock = clocks_[pipeline_.worker_of(action.stage)];
    try {
      auto in = edges_.receive(action);
      std::vector<Parcel> out;
      measure([&] {
        if (clock) clock->start();
        out = mini_batch_.run(action, std::move(in));
        if (clock) clock->end();
      });
      edges_.send(action, std::move(out));
    } catch (const ConnectionError&) {
      throw;
    } catch (...) {
      report_error(action);
      throw;
    }
  }

  void cancel(const Failure& failure) noexcept override {
    std::string place;
    if (failure.action) {
      const auto info = describe(*failure.action, failure.error);
      place = to_string(info);
      pipeline_.set_error(info);
    }
    pipeline_.team().fail(failure.error, failure.action ? "in " + place : "at the end of transfers between devices");
  }

  Bytes bytes(int worker) override { return counter_ ? counter_->count(worker) : Bytes(); }

  ErrorInfo describe(const Action& action, const std::exception_ptr& error) const {
    const auto& stage = pipeline_.stages()[action.stage];
    ErrorInfo info{.action = action, .message = message_of(error)};
    const auto& cell = mini_batch_.cell(action);
    const int layer = cell ? cell->layer() : -1;
    if (layer < 0) return info;
    info.layer = stage.first_layer + layer;
    info.layer_name = stage.name_of(layer);
    return info;
  }

  void report_error(const Action& action) const {
    const auto& on_error = pipeline_.binding().on_error;
    if (on_error) on_error(describe(action, std::current_exception()), std::current_exception());
  }

  // The devices of results that are not on the last stage's.
  const std::vector<c10::Device>& other_devices() const { return mini_batch_.outputs_.other_devices(); }

  MiniBatch& mini_batch_;
  Pipeline& pipeline_;
  Timeline* const timeline_;  // may be null
  const std::shared_ptr<ByteCounter> counter_;
  const Part part_;
  const at::ThreadLocalState state_;  // the caller's
  // Per worker.
  std::vector<StreamEvent> begin_;                  // the caller's work on its device
  std::vector<StreamEvents> end_;                   // its work, on all devices
  std::vector<std::optional<ActionClock>> clocks_;  // if actions are timed on its device
  Edges edges_;
};

void MiniBatch::run_actions(Part part) { PartRun(*this, part).execute(); }

}  // namespace gpipe
