#pragma once

#include <ATen/ThreadLocalState.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gpipe/autograd/batch_statistics.h"
#include "gpipe/autograd/cell.h"
#include "gpipe/micro_batch.h"
#include "gpipe/pipeline.h"
#include "gpipe/runtime/byte_counter.h"
#include "gpipe/runtime/cells.h"

namespace gpipe {

/// One mini-batch in flight: its cells, and the slots in which parcels and gradients wait on their edges. Made by a
/// forward; kept alive by the graph of its outputs until their backward.
///
/// Slots need no lock: a parcel is written before its edge is put and read after it is taken. A cell belongs to the
/// worker of its stage.
class MiniBatch : public Cells {
 public:
  /// With `grad`, cells keep what a backward needs.
  MiniBatch(std::shared_ptr<Pipeline> pipeline, std::vector<Parcel> inputs, Checkpoint checkpoint, bool grad,
            bool deferred_batch_norm);

  /// Runs the forwards. On an error all is as before the call: buffers, the default generator, no cell left.
  Gathered forward();

  /// What backward() needs of each input, output and parameter; `gradients[i]` is the i-th micro-batch's, one a tensor
  /// of the output parcel. Valid after forward().
  struct BackwardResult {
    std::vector<Gradients> inputs;      ///< per micro-batch
    std::vector<Gradients> parameters;  ///< per stage, as sinks(stage).parameters()
  };
  BackwardResult backward(std::vector<Gradients> gradients, bool retain_graph);

  const ParameterSinks& sinks(int stage) const { return sinks_[stage]; }

  void work(int worker, absl::FunctionRef<void()> run_actions) override;
  void run(const Action& action) override;
  Bytes bytes(int worker) override;

 private:
  class Counting;
  void release_to_caller(const std::vector<at::Tensor>& tensors);
  void run_forward(int stage, int micro_batch);
  void run_backward(int stage, int micro_batch);
  void perform(Part part);
  ErrorInfo describe(const Failure& failure);
  void report_error(const Action& action);
  void wait_for_stages();
  Parcel receive(int edge, int micro_batch);
  std::unique_ptr<Cell>& cell(int stage, int micro_batch) { return cells_[stage * micro_batches_ + micro_batch]; }
  int slot(int edge, int micro_batch) const { return edge * micro_batches_ + micro_batch; }

  struct ParcelSlot {
    Parcel parcel;
    StreamEvent ready;
  };
  struct GradientSlot {
    Gradients gradients;
    StreamEvent ready;
  };

  const std::shared_ptr<Pipeline> pipeline_;
  const int micro_batches_;
  const bool grad_;
  const std::shared_ptr<const Program> program_;
  const Pipeline::Recording recording_;
  std::shared_ptr<ByteCounter> counter_;  // of a mini-batch that is recorded, unless a profiler is at work
  /// The caller's, at forward(): held again in every recompute.
  std::optional<at::ThreadLocalState> forward_state_;
  std::uint64_t seed_ = 0;
  std::vector<ParameterSinks> sinks_;
  std::vector<BatchStatistics> statistics_;  // per stage; none unless batch norm is deferred
  std::vector<std::unique_ptr<Cell>> cells_;

  std::vector<Parcel> inputs_;             // per micro-batch
  std::vector<StreamEvent> inputs_ready_;  // per input tensor
  std::vector<Link> input_links_;          // per input tensor
  std::vector<Parcel> outputs_;            // per micro-batch
  std::vector<ParcelSlot> parcels_;        // per edge and micro-batch
  std::vector<GradientSlot> gradients_;    // per edge and micro-batch

  // Of the run under way.
  std::optional<at::ThreadLocalState> state_;
  std::vector<StreamEvent> begin_;  // per stage: the caller's work on its device so far
  std::vector<StreamEvent> end_;    // per stage: the stage's work
  bool retain_graph_ = false;
  bool counted_ = false;
  std::vector<Gradients> output_gradients_;  // per micro-batch
  std::vector<Gradients> input_gradients_;   // per micro-batch
  std::vector<GradientSums> sums_;           // per stage
};

}  // namespace gpipe
