#pragma once

#include <ATen/ThreadLocalState.h>

#include "gpipe/run/edges.h"

namespace gpipe {

/// Gives this thread another thread's state for its lifetime, with the autograd engine's multithreading off.
class CallerStateScope {
 public:
  explicit CallerStateScope(const at::ThreadLocalState& state);

 private:
  at::ThreadLocalStateGuard guard_;
};

/// The cells that the actions of a program run.
class Cells {
 public:
  virtual ~Cells() = default;

  /// Runs an action on its worker's thread, with what Edges::receive() has returned. Returns what Edges::send() takes.
  virtual std::vector<Parcel> run(const Action& action, std::vector<Parcel> in) = 0;
  /// The layer that an action's cell is running, by its index in the stage; -1 for none. Called as run().
  virtual int running_layer(const Action& action) const = 0;
};

/// One run of a part of a program. Gives the workers' threads the caller's state, the worker's stream, the number of
/// intra-op threads and the byte counter. Orders the work of the caller and of the workers on their devices. Carries
/// what actions exchange, records them in a timeline, and tells of errors.
///
/// Thread safety: made, executed and destroyed on the caller's thread, within a Call.
class PartRun : public ActionRunner {
 public:
  /// Notes the caller's work. `key`: see Edges. All references must outlive this.
  PartRun(Pipeline& pipeline, const Program& program, Part part, const LayoutKey& key,
          const Pipeline::Recording& recording, CallerInputs& inputs, const Outputs& outputs, Cells& cells);
  ~PartRun() override;

  /// Returns when all workers rest. The caller's streams then wait for their work on any device. Errors: the first one;
  /// Pipeline::error() says where it came from.
  void execute();

 private:
  class ActionClock;

  void on_worker(int worker, absl::FunctionRef<void()> run_actions) override;
  void run(const Action& action, Measure measure) override;
  void cancel(const Failure& failure) noexcept override;
  Bytes bytes(int worker) override;

  void start(int worker);
  void end(int worker);
  ErrorInfo describe(const Action& action, const std::exception_ptr& error) const;
  /// REQUIRES: an exception is being handled.
  void report_error(const Action& action) const;
  void await_workers(const std::vector<c10::Device>& devices) const;

  Pipeline& pipeline_;
  const Program& program_;
  const Part part_;
  const Pipeline::Recording& recording_;
  const Outputs& outputs_;
  Cells& cells_;
  const at::ThreadLocalState state_;  // the caller's
  // Per worker.
  std::vector<StreamEvent> begin_;                    // the caller's work on its device
  std::vector<StreamEvents> end_;                     // its work, on all devices
  std::vector<std::unique_ptr<ActionClock>> clocks_;  // null unless actions are timed on its device
  Edges edges_;
};

}  // namespace gpipe
