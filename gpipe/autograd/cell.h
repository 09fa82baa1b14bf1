#pragma once

#include <optional>

#include "gpipe/autograd/parameter_sinks.h"
#include "gpipe/autograd/split_backward.h"

namespace gpipe {

/// The loss of step(): one more layer of the last stage's cells. Runs once per cell: in R if there is one, else in F.
struct CellLoss {
  std::function<at::Tensor(const Value& output)> layer = nullptr;
  /// Whether tensors that the loss uses and that require grad, such as its own parameters, get gradients.
  bool adopts_leaves = true;
};

/// One (stage, micro-batch) of a mini-batch: its inputs and graph, which it frees. Used by the worker of its stage.
class Cell {
 public:
  /// `stage` and `sinks` must outlive this. `seed` is the mini-batch's.
  Cell(Stage& stage, ParameterSinks& sinks, std::uint64_t seed, int micro_batch, CellLoss loss = {});
  /// Ends a recompute whose backward has failed or never ran.
  ~Cell();

  /// F. `in` holds the activation, then the skips and the borrowed parameters in the stage's order. The result holds
  /// the activation, the skips and the lent parameters. `grad`: a backward follows. `recompute`: it stores the inputs
  /// instead of the graph, which an R will build.
  /// Errors: what the layers throw; as SkipRoutes, AliasCheck::check() and ParameterSinks::redirect();
  /// std::runtime_error when a lent or borrowed parameter, or an input without a copy, was changed in place.
  std::vector<Parcel> forward(std::vector<Parcel> in, bool grad, bool recompute);

  /// R. Runs the layers with the inputs and state of F. The backward, or the cell's destructor, restores the present
  /// state. REQUIRES: no other F or R of the stage runs before that. Unless `retain_graph`, uses up the stored inputs.
  /// Errors: as forward(); std::runtime_error when an output needs a gradient but was not sent so.
  void recompute(bool retain_graph);

  /// B. `gradients[k]` belongs to the k-th parcel of forward()'s result. Returns the gradients of its `in`, and adds
  /// those of the parameters to `sums`. Unless `retain_graph`, uses up the graph.
  /// Errors, also of I and W: what the layers' backwards throw; std::runtime_error when an input of the
  /// recompute was changed in place.
  std::vector<Gradients> backward(const std::vector<Gradients>& gradients, bool retain_graph, GradientSums& sums);

  /// I. As backward(), but leaves gradients of parameters to backward_weights(); see SplitBackward.
  std::vector<Gradients> backward_inputs(const std::vector<Gradients>& gradients, GradientSums& sums);
  /// W. Adds the gradients that backward_inputs() has left. Uses up the graph.
  void backward_weights(GradientSums& sums);

  /// Drops a graph that recompute() can build again.
  void drop_graph();

  /// The layer that is running, by its index in the stage; the number of layers for the loss; -1 for none.
  int layer() const { return layer_; }

 private:
  std::vector<at::Tensor> enter_parcel(const Parcel& parcel, bool graph, AliasCheck& aliases);
  Value call_layers(Value value, const std::vector<Borrowed>& borrowed,
                    absl::FunctionRef<void(const std::string& layer)> after_layer);
  std::vector<Parcel> run_layers(const std::vector<Parcel>& in, bool graph, StageState::Pass pass);
  void store_inputs(const std::vector<Parcel>& in);
  void check_inputs(bool have_changed, const std::string& when);
  void separate_from_state(Parcel& parcel) const;
  torch::autograd::edge_list all_roots() const;
  RootGradients root_gradients(const std::vector<Gradients>& gradients) const;
  void run_graph(const RootGradients& roots, bool retain_graph, GradientSums& sums,
                 std::vector<GradientSums>& entering);

  Stage& stage_;
  ParameterSinks& sinks_;
  const std::uint64_t seed_;
  const int micro_batch_;
  const CellLoss loss_;
  int layer_ = -1;

  // Of a checkpointed cell.
  bool is_checkpointed_ = false;
  bool stores_copies_ = false;
  std::vector<Parcel> inputs_;                         // or copies
  std::vector<VersionWatch> originals_;                // of the inputs, until the first backward
  std::optional<StageState::Saved> state_at_forward_;  // until the last recompute
  std::optional<StageState::Saved> state_now_;         // between R and B or I
  CellMemo memo_;
  std::vector<std::vector<bool>> sent_;  // wants_gradient of the parcels that F returned

  // The graph, per parcel and tensor; null or invalid where no gradient flows.
  EntrySinks entry_sinks_;
  std::vector<torch::autograd::edge_list> roots_;
  std::optional<SplitBackward> split_;  // between I and W
  std::vector<VersionWatch> versions_;  // of the parameters, at I
};

}  // namespace gpipe
