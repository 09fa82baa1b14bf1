#pragma once

#include <ATen/ThreadLocalState.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gpipe/autograd/batch_statistics.h"
#include "gpipe/autograd/cell.h"
#include "gpipe/borrowed_values.h"
#include "gpipe/gradient_reduction.h"
#include "gpipe/inlet.h"
#include "gpipe/loss.h"
#include "gpipe/loss_check.h"
#include "gpipe/micro_batch.h"
#include "gpipe/parcel_edges.h"
#include "gpipe/pipeline.h"
#include "gpipe/ranks/exchange.h"
#include "gpipe/runtime/action_clock.h"
#include "gpipe/runtime/byte_counter.h"
#include "gpipe/runtime/cells.h"
#include "gpipe/transport.h"

namespace gpipe {

/// One mini-batch in flight: runs its program's actions on its cells. A forward makes one, which the graph of its outputs
/// keeps alive until their backward. A step makes one for its duration.
///
/// Thread safety: forward(), backward() and step() take the pipeline's turn. Only the worker of its stage uses a cell.
/// Parcels and gradients pass between stages through the Transport.
class MiniBatch : public Cells {
 public:
  struct Options {
    Pipeline::Use use = Pipeline::Use::kForward;
    Checkpoint checkpoint = Checkpoint::kNever;
    bool deferred_batch_norm = false;
    bool training = true;
    std::vector<std::int64_t> sizes = {};  ///< of the micro-batches
    std::uint64_t data = 0;                ///< see Call
    std::string call = {};                 ///< what the call is, for the other ranks
    std::string in_common = {};            ///< what it has in common with those of other replicas
  };
  /// `inputs` holds one parcel per micro-batch; `loss` serves step(). Unless options.use is kForward, cells keep what a
  /// backward needs.
  MiniBatch(std::shared_ptr<Pipeline> pipeline, std::vector<Parcel> inputs, Options options, LossOfMiniBatch loss = {});

  /// Runs the forwards. After an error, buffers and the default generator are as before the call, and no cell is left.
  Gathered forward();

  struct BackwardResult {
    std::vector<Gradients> inputs;      ///< per micro-batch
    std::vector<Gradients> parameters;  ///< per stage, in the order of sinks(stage).parameters()
  };
  /// Runs the backwards. `gradients[i]` belongs to the i-th micro-batch's output parcel. Can be repeated after
  /// `retain_graph`. REQUIRES: forward() has returned.
  BackwardResult backward(std::vector<Gradients> gradients, bool retain_graph);

  struct StepOutcome {
    at::Tensor loss;  ///< detached
    Gathered output;  ///< if the loss keeps outputs
    BackwardResult gradients;
  };
  /// Runs forwards, losses and backwards in the order of the pipeline's schedule. After an error, as after forward().
  StepOutcome step();

  /// Valid after forward() or step().
  const ParameterSinks& sinks(int stage) const { return sinks_[stage]; }

  void work(int worker, absl::FunctionRef<void()> run_actions) override;
  void run(const Action& action) override;
  void take(const Action& action) override;
  void put(const Action& action) override;
  void cancel(const Failure& failure) noexcept override;
  Bytes bytes(int worker) override;

 private:
  class BackwardScope;

  void prepare_call(absl::FunctionRef<void()> prepare);
  void begin(absl::FunctionRef<void()> run);
  void agree();
  std::string trained_parameters() const;
  bool has_replicas() const { return pipeline_->has_replicas(); }
  void begin_reduction();
  void check_gradients_untouched() const;
  void begin_backward();
  void perform(Part part);
  Gathered gather_outputs();
  Gathered share_outputs();
  at::Tensor share_loss();
  bool has_last_stage() const { return pipeline_->is_here(pipeline_->count() - 1); }
  void report_failure() noexcept;
  BackwardResult take_gradients();
  Tail tail(int stage, int micro_batch);
  void note_results(const std::vector<at::Tensor>& results);
  Gradients output_gradients(int micro_batch);
  std::vector<Parcel> receive_inputs(int stage, int micro_batch);
  void run_forward(int stage, int micro_batch);
  void run_recompute(int stage, int micro_batch);
  void run_backward(int stage, int micro_batch, bool split);
  void run_backward_weights(int stage, int micro_batch);
  void run_and_reduce(const Action& action, absl::FunctionRef<void()> run);

  void check_parameters_unchanged() const;
  void wait_for_workers();
  void place_spans(Timeline& timeline, std::size_t first);
  static void use_on_this_thread(const std::vector<at::Tensor>& tensors);
  void stop_counting(const std::vector<at::Tensor>& tensors);
  ErrorInfo describe(const Action& action, const std::exception_ptr& error);
  /// REQUIRES: an exception is being handled.
  void report_error(const Action& action);

  std::optional<ActionClock>& clock_of(int stage) { return clocks_[pipeline_->worker_of(stage)]; }
  std::unique_ptr<Cell>& cell(int stage, int micro_batch) { return cells_[stage * micro_batches_ + micro_batch]; }

  const std::shared_ptr<Pipeline> pipeline_;
  const int micro_batches_;
  const Pipeline::Use use_;
  const std::shared_ptr<const Program> program_;
  const Pipeline::Recording recording_;
  std::shared_ptr<ByteCounter> counter_;  // null unless bytes are recorded
  /// The caller's state in forward() or step(). Every recompute runs with it.
  std::optional<at::ThreadLocalState> forward_state_;
  std::uint64_t seed_ = 0;
  std::vector<ParameterSinks> sinks_;        // per stage
  std::vector<BatchStatistics> statistics_;  // per stage; empty unless batch norm is deferred
  std::vector<std::unique_ptr<Cell>> cells_;
  Inlet inputs_;
  Transport transport_;
  BorrowedValues borrowed_values_;
  const Options options_;
  std::uint64_t call_number_ = 0;
  int first_micro_batch_ = 0;            // of this replica, among those of all
  double share_ = 1;                     // of the samples of all replicas
  std::optional<ParcelEdges> crossing_;  // this and the next: only over ranks
  std::optional<Exchange> exchange_;     // of the part that runs
  LossOfMiniBatch loss_;
  Inlet targets_;
  std::vector<Parcel> outputs_;         // per micro-batch
  std::vector<c10::Device> elsewhere_;  // of results that are not on the last stage's device
  std::vector<at::Tensor> losses_;      // per micro-batch, of step()
  std::optional<LossComparison> comparison_;

  // The present run.
  std::optional<at::ThreadLocalState> state_;
  std::optional<at::ThreadLocalState> backward_state_;  // of step()
  std::vector<StreamEvent> begin_;                      // per worker: the caller's work on its device
  std::vector<StreamEvents> end_;                       // per worker: its work, on all devices
  std::vector<std::optional<ActionClock>> clocks_;      // per worker: on an accelerator, if it is traced
  bool retain_graph_ = false;
  bool counted_ = false;
  std::vector<Gradients> output_gradients_;  // per micro-batch
  std::vector<StreamEvent> outputs_ready_;   // per gradient of a micro-batch: after the caller's work on its device
  std::vector<Gradients> input_gradients_;   // per micro-batch
  std::vector<GradientSums> sums_;           // per stage
  std::vector<Action> last_backwards_;       // per stage; this and the next: only with replicas
  std::vector<std::pair<at::Tensor, std::uint32_t>> present_gradients_;  // each parameter's `.grad`, with its version
  std::unique_ptr<GradientReduction> reduction_;
};

}  // namespace gpipe
