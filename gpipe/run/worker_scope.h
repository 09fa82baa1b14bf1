#pragma once

#include <ATen/ThreadLocalState.h>

#include "gpipe/run/pipeline.h"
#include "gpipe/tensors/byte_counter.h"
#include "gpipe/timeline.h"

namespace gpipe {

/// Gives this thread another thread's state for its lifetime, with the autograd engine's multithreading off.
class CallerStateScope {
 public:
  explicit CallerStateScope(const at::ThreadLocalState& state);

 private:
  at::ThreadLocalStateGuard guard_;
};

/// Prepares a worker's thread for its part of a mini-batch, for its lifetime: sets the caller's state, the worker's stream,
/// the number of intra-op threads and the byte counter, and turns the autocast cache off.
class WorkerScope {
 public:
  /// `counter` may be null.
  WorkerScope(const Pipeline& pipeline, int worker, const at::ThreadLocalState& state, const ByteCounter* counter);

 private:
  CallerStateScope state_;
  c10::OptionalStreamGuard stream_;
  ByteCounter::Worker counted_;
};

/// Times the actions of one worker on its device by events, so that the host need not wait for each. Its worker calls
/// start(), end() and stop(), with its stream current. Then one other thread may call place().
class ActionClock {
 public:
  /// REQUIRES: `device` is not the CPU.
  explicit ActionClock(c10::Device device) : device_(device) {}

  /// Marks where an action's work begins. Call it after the waits for the action's inputs.
  void start();
  /// Marks where the work of the action that started last ends.
  void end();
  /// Waits for the device's stream. Call it after the last action.
  void stop();

  /// Sets the times of an action's span. Does nothing before stop(). REQUIRES: the calls come in the order of the actions.
  void place(Span& span);

 private:
  struct Marks {
    StreamEvent start;
    StreamEvent end;
  };

  c10::Device device_;
  std::vector<Marks> actions_;
  std::size_t placed_ = 0;
  StreamEvent last_;
  double stopped_ = 0;  // the host's time at `last_`, in seconds
};

/// Orders the work of the caller and of the workers on their devices during one run, and times traced actions there.
///
/// Thread safety: begin(), end() and clock() on the worker's thread; the other functions on the caller's, while no worker runs.
class WorkerEvents {
 public:
  /// Notes the caller's work. `times`: whether actions on accelerators are timed. `pipeline` must outlive this.
  WorkerEvents(const Pipeline& pipeline, bool times);

  /// The worker's stream waits for the caller's work.
  void begin(int worker);
  /// Notes the worker's work on its device and on `others`.
  void end(int worker, const std::vector<c10::Device>& others);
  /// Null unless the worker's actions are timed.
  ActionClock* clock(int worker) { return clocks_[worker] ? &*clocks_[worker] : nullptr; }

  /// The caller's streams on these devices wait for all workers.
  void await_workers(const std::vector<c10::Device>& devices) const;
  /// Sets the times of the spans from `first` on that accelerators ran.
  void place_spans(Timeline& timeline, std::size_t first);

 private:
  const Pipeline& pipeline_;
  const bool times_;
  // Per worker.
  std::vector<StreamEvent> begin_;  // the caller's work on its device
  std::vector<StreamEvents> end_;   // its work, on all devices
  std::vector<std::optional<ActionClock>> clocks_;
};

}  // namespace gpipe
