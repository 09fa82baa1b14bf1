#pragma once

#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gpipe/autograd/checkpointing.h"
#include "gpipe/autograd/gradient_sums.h"
#include "gpipe/autograd/parcel.h"
#include "gpipe/autograd/stage.h"

namespace gpipe {

/// How a forward is to run.
struct ForwardMode {
  bool grad = false;       ///< build a graph
  bool recompute = false;  ///< with grad: store inputs instead of the graph, which an R will build
};

/// A (stage, micro-batch) of one mini-batch: inputs, graph, nothing else. Destroying it frees its activations. Used by
/// one thread, its stage's worker, at a time.
class Cell {
 public:
  Cell(Stage& stage, const ParameterSinks& sinks, std::uint64_t seed, int micro_batch);
  ~Cell();

  /// F. `in` holds the activation, then the skips in the stage's order; so does what is returned.
  /// Errors: what the layers throw; std::runtime_error when a declared skip was not stashed or popped, when a skip was
  /// changed in place before it was popped, or when a layer changed its input in place that never did before and the
  /// cell is to be recomputed; see also ParameterSinks::redirect.
  std::vector<Parcel> forward(std::vector<Parcel> in, ForwardMode mode);

  /// R. Runs the layers with the buffers that F had. Buffers and parameters are as they were before again after the
  /// backward, which may use what they are now, or when the cell is destroyed. Uses up the stored inputs unless `retain_graph`.
  /// Errors: what the layers throw; std::runtime_error when inputs were changed in place since F.
  void recompute(bool retain_graph);

  /// B. `gradients[k]` belongs to the k-th parcel of forward's result; returns those of its `in`, and adds the
  /// parameters' to `sums`. The graph is used up unless `retain_graph`.
  std::vector<Gradients> backward(const std::vector<Gradients>& gradients, bool retain_graph, GradientSums& sums);

  /// Drops a graph that recompute can build again.
  void drop_graph();

  /// The layer that runs, by its index in the stage; -1 when none does.
  int layer() const { return layer_; }

 private:
  class Context;

  std::vector<Parcel> run_layers(const std::vector<Parcel>& in, bool graph, PassScope::Pass pass);

  Stage& stage_;
  const ParameterSinks& sinks_;
  const std::uint64_t seed_;
  const int micro_batch_;
  int layer_ = -1;

  /// What entered, kept for R; and, while the stage is being observed, the tensors that it is a copy of.
  std::vector<Parcel> stored_;
  std::vector<Parcel> observed_;
  /// The stage's buffers as they were at F, for R.
  std::optional<SavedBuffers> buffers_;
  CellMemo memo_;
  /// Which tensors F said need gradients, parcel by parcel.
  std::vector<std::vector<bool>> sent_;

  /// What an R has changed, from then until its backward has run.
  class Borrowed;
  std::unique_ptr<Borrowed> borrowed_;
  /// One a tensor, parcel by parcel; null or invalid where no gradient runs.
  std::vector<std::vector<std::shared_ptr<GradientSink>>> entry_sinks_;
  std::vector<torch::autograd::edge_list> roots_;
};

}  // namespace gpipe
