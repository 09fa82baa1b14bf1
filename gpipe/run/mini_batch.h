#pragma once

#include <ATen/ThreadLocalState.h>

#include <deque>

#include "gpipe/autograd/cell.h"
#include "gpipe/run/action_clock.h"
#include "gpipe/run/call.h"
#include "gpipe/run/edges.h"
#include "gpipe/run/gradients.h"

namespace gpipe {

/// One mini-batch: runs a program's actions on cells, sets up the workers' threads as the caller's, and orders the work
/// on devices. The graph of a forward's outputs keeps it until their backward.
///
/// Thread safety: start() and backward() belong to a Call. Only the worker of its stage uses a cell.
class MiniBatch : private ActionRunner {
 public:
  struct Options {
    StepKey key;  ///< what the call is; if it measures, the actions are recorded in any case
    bool deferred_batch_norm;
    bool accumulates = false;  ///< see BackwardGradients
  };
  /// `inputs` holds one parcel per micro-batch; `loss`, which must outlive this, serves a step.
  MiniBatch(std::shared_ptr<Pipeline> pipeline, std::vector<Parcel> inputs, Options options, StepLoss* loss = nullptr);

  /// Runs the forwards; with a loss, the whole step. REQUIRES: after an error, destroy this, then call Call::fail().
  Results start(Call& call);

  /// Runs the backwards after a start() without a loss. `gradients[i]` belongs to the i-th micro-batch's output parcel.
  /// Can be repeated after `retain_graph`. After an error, no cell is left.
  BackwardGradients::Result backward(Call& call, std::vector<Gradients> gradients, bool retain_graph);

  /// Valid after start().
  const ParameterSinks& sinks(int stage) const { return sinks_[stage]; }

  /// The actions of a step that measures.
  Timeline timeline() const;

 private:
  /// Of one run of a part of the program.
  struct Run {
    Run(MiniBatch& mini_batch, Part part);

    const at::ThreadLocalState state;  // the caller's
    struct Worker {
      StreamEvent begin;                 // the caller's work on its device
      StreamEvents end;                  // its work, on all devices
      std::optional<ActionClock> clock;  // if actions are timed on its device
      std::deque<StreamEvent> ahead;     // one event after each of the last actions
    };
    std::vector<Worker> workers;
    Edges edges;
  };

  void begin(Call& call);
  Results run_part(Part part);
  void run_actions(Part part);
  void await_workers(std::size_t recorded);

  // Of ActionRunner: on the workers' threads.
  void on_worker(int worker, absl::FunctionRef<void()> run_actions) override;
  void run(const Action& action, Measure measure) override;
  void cancel(const Failure& failure) noexcept override;
  Bytes bytes(int worker) override { return recording_.counter ? recording_.counter->count(worker) : Bytes(); }

  void end_worker(int worker);
  void stay_near(int worker);
  /// Take what Edges::receive() has returned, and return what Edges::send() takes.
  std::vector<Parcel> compute(const Action& action, std::vector<Parcel> in);
  std::vector<Parcel> forward(const Action& action, std::vector<Parcel> in);
  std::vector<Parcel> backward(const Action& action, std::vector<Parcel> in);
  ErrorInfo describe(const Action& action, const std::exception_ptr& error) const;

  std::size_t index(const Action& action) const { return action.stage * micro_batches_ + action.micro_batch; }

  const std::shared_ptr<Pipeline> pipeline_;
  const int micro_batches_;
  const Options options_;
  const bool grad_;  // whether a backward follows
  const std::shared_ptr<const Program> program_;
  CallState::Recording recording_;
  const at::ThreadLocalState forward_state_;  // the caller's; every recompute runs with it
  std::vector<ParameterSinks> sinks_;         // per stage
  std::vector<BatchStatistics> statistics_;   // per stage; empty unless batch norm is deferred
  std::vector<std::unique_ptr<Cell>> cells_;
  CallerInputs inputs_;
  BorrowedValues borrowed_values_;
  Outputs outputs_;
  StepLoss* const loss_;                        // null in a forward
  std::optional<BackwardGradients> gradients_;  // during a backward
  bool retain_graph_ = false;
  std::optional<Run> run_;

  // What the ranks have agreed on.
  std::uint64_t call_number_ = 0;
  std::uint64_t seed_ = 0;
  int first_micro_batch_ = 0;  // the index of this replica's first micro-batch among those of all replicas
  double share_ = 1;           // of the samples of all replicas
};

}  // namespace gpipe
