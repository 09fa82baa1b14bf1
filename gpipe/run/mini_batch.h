#pragma once

#include <ATen/ThreadLocalState.h>

#include "gpipe/autograd/cell.h"
#include "gpipe/run/call.h"
#include "gpipe/run/edges.h"
#include "gpipe/run/results.h"

namespace gpipe {

/// Gives this thread another thread's state for its lifetime, with the autograd engine's multithreading off.
class CallerStateScope {
 public:
  explicit CallerStateScope(const at::ThreadLocalState& state);

 private:
  at::ThreadLocalStateGuard guard_;
};

/// The cells of one mini-batch. The graph of a forward's outputs keeps it until their backward.
///
/// Thread safety: start() and backward() belong to a Call. Only the worker of its stage uses a cell.
class MiniBatch {
 public:
  struct Options {
    Pipeline::Use use = Pipeline::Use::kForward;
    Checkpoint checkpoint = Checkpoint::kNever;
    bool deferred_batch_norm = false;
    bool training = true;
    StepKey key = {};                      ///< what the call is
    std::vector<std::int64_t> sizes = {};  ///< of the micro-batches
    bool measures = false;                 ///< whether to record the actions in any case
    bool accumulates = false;              ///< see BackwardGradients
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
  class PartRun;

  void begin(Call& call);
  Results run_part(Part part);
  // In part_run.cpp: returns when all workers rest. The caller's streams then wait for their work on any device.
  // Errors: the first one; Pipeline::error() says where it came from.
  void run_actions(Part part);
  // Runs an action on its worker's thread, with what Edges::receive() has returned. Returns what Edges::send() takes.
  std::vector<Parcel> run(const Action& action, std::vector<Parcel> in);
  std::vector<Parcel> run_forward(const Action& action, std::vector<Parcel> in);
  std::vector<Parcel> run_backward(const Action& action, std::vector<Parcel> in);

  std::size_t index(const Action& action) const { return action.stage * micro_batches_ + action.micro_batch; }
  std::unique_ptr<Cell>& cell(const Action& action) { return cells_[index(action)]; }

  const std::shared_ptr<Pipeline> pipeline_;
  const int micro_batches_;
  const Options options_;
  const bool grad_;  // whether a backward follows
  const std::shared_ptr<const Program> program_;
  Pipeline::Recording recording_;
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

  // What the ranks have agreed on.
  std::uint64_t call_number_ = 0;
  std::uint64_t seed_ = 0;
  int first_micro_batch_ = 0;  // the index of this replica's first micro-batch among those of all replicas
  double share_ = 1;           // of the samples of all replicas
};

}  // namespace gpipe
