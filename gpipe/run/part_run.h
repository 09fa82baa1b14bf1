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

class MiniBatch;

/// Runs a part of a mini-batch's program. Sets up the workers' threads as the caller's, orders the work on devices,
/// carries what actions exchange, records actions in a timeline, and tells of errors.
///
/// Thread safety: made, executed and destroyed on the caller's thread, within a Call.
class PartRun : public ActionRunner {
 public:
  /// Notes the caller's work. `key`: see Edges. All references must outlive this.
  PartRun(Pipeline& pipeline, const Program& program, Part part, const LayoutKey& key,
          const Pipeline::Recording& recording, CallerInputs& inputs, const Outputs& outputs, MiniBatch& mini_batch);
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
  void report_error(const Action& action) const;
  void await_workers(const std::vector<c10::Device>& devices) const;

  Pipeline& pipeline_;
  const Program& program_;
  const Part part_;
  const Pipeline::Recording& recording_;
  const Outputs& outputs_;
  MiniBatch& mini_batch_;
  const at::ThreadLocalState state_;                  // the caller's
  std::vector<StreamEvent> begin_;                    // per worker: the caller's work on its device
  std::vector<StreamEvents> end_;                     // per worker: its work, on all devices
  std::vector<std::unique_ptr<ActionClock>> clocks_;  // per worker; null unless actions are timed on its device
  Edges edges_;
};

}  // namespace gpipe
