#pragma once

#include <ATen/ThreadLocalState.h>

#include <exception>

#include "gpipe/autograd/batch_statistics.h"
#include "gpipe/autograd/cell.h"
#include "gpipe/run/call.h"
#include "gpipe/run/edges.h"
#include "gpipe/run/step_loss.h"
#include "gpipe/run/worker_scope.h"

namespace gpipe {

/// The cells of one mini-batch. Runs its program's actions on them. A forward makes one, which the graph of its outputs keeps
/// alive until their backward. A step makes one for its duration.
///
/// Thread safety: forward(), backward() and step() belong to a Call. Only the worker of its stage uses a cell.
class MiniBatch : public ActionRunner {
 public:
  struct Options {
    Pipeline::Use use = Pipeline::Use::kForward;
    Checkpoint checkpoint = Checkpoint::kNever;
    bool deferred_batch_norm = false;
    bool training = true;
    std::vector<std::int64_t> sizes = {};  ///< of the micro-batches
    Proposal proposal = {};                ///< what the call is
    bool measures = false;                 ///< whether to record the actions in any case
  };
  /// `inputs` holds one parcel per micro-batch; `loss`, which must outlive this, serves step(). Unless options.use is
  /// kForward, cells keep what a backward needs.
  MiniBatch(std::shared_ptr<Pipeline> pipeline, std::vector<Parcel> inputs, Options options, StepLoss* loss = nullptr);

  /// Runs the forwards. REQUIRES: after an error, destroy this, then call Call::fail().
  Gathered forward(Call& call);

  /// Runs the backwards. `gradients[i]` belongs to the i-th micro-batch's output parcel. Can be repeated after
  /// `retain_graph`. After an error, no cell is left. REQUIRES: forward() has returned.
  BackwardGradients::Result backward(Call& call, std::vector<Gradients> gradients, bool retain_graph);

  /// Runs forwards, losses and backwards in the order of the pipeline's schedule. REQUIRES: as forward().
  Results step(Call& call);

  /// Valid after forward() or step().
  const ParameterSinks& sinks(int stage) const { return sinks_[stage]; }

  /// The actions of a step() that measures.
  Timeline timeline() const;

  void on_worker(int worker, absl::FunctionRef<void()> run_actions) override;
  void run(const Action& action, Measure measure) override;
  void cancel(const Failure& failure) noexcept override;
  Bytes bytes(int worker) override;

 private:
  void begin(Call& call);
  void agree(Call& call);
  void join_over_replicas(BatchStatistics& statistics, const std::vector<at::Tensor>& buffers);
  void finish();
  void run_part(Part part);
  Results take_results();
  BackwardGradients::Result take_gradients();

  std::vector<Parcel> run_action(const Action& action, std::vector<Parcel> in);
  std::vector<Parcel> run_forward(const Action& action, std::vector<Parcel> in);
  std::vector<Parcel> run_backward(const Action& action, std::vector<Parcel> in);

  void hand_over(const std::vector<at::Tensor>& tensors);
  ErrorInfo describe(const Action& action, const std::exception_ptr& error);
  /// REQUIRES: an exception is being handled.
  void report_error(const Action& action);

  std::unique_ptr<Cell>& cell(const Action& action) {
    return cells_[action.stage * micro_batches_ + action.micro_batch];
  }

  const std::shared_ptr<Pipeline> pipeline_;
  const int micro_batches_;
  const Options options_;
  const bool grad_;  // whether a backward follows
  const std::shared_ptr<const Program> program_;
  const Pipeline::Recording recording_;
  std::shared_ptr<ByteCounter> counter_;      // null unless bytes are recorded
  const at::ThreadLocalState forward_state_;  // the caller's; every recompute runs with it
  std::uint64_t seed_ = 0;
  std::vector<ParameterSinks> sinks_;        // per stage
  std::vector<BatchStatistics> statistics_;  // per stage; empty unless batch norm is deferred
  std::vector<std::unique_ptr<Cell>> cells_;
  CallerInputs inputs_;
  BorrowedValues borrowed_values_;
  Outputs outputs_;
  StepLoss* const loss_;  // null in a forward
  std::uint64_t call_number_ = 0;
  int first_micro_batch_ = 0;  // the index of this replica's first micro-batch among those of all replicas
  double share_ = 1;           // of the samples of all replicas

  // The present run.
  std::optional<Edges> edges_;
  std::optional<at::ThreadLocalState> state_;
  std::optional<at::ThreadLocalState> backward_state_;  // of step()
  std::optional<WorkerEvents> events_;
  bool retain_graph_ = false;
  bool counted_ = false;  // whether counter_ counts: nothing else listens to allocations
  std::optional<BackwardGradients> gradients_;
};

}  // namespace gpipe
