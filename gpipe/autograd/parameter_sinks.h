#pragma once

#include <c10/core/StreamGuard.h>

#include <optional>

#include "absl/container/flat_hash_map.h"
#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {

/// The sinks for the gradients of a stage's parameters during one mini-batch. A cell's graph ends in them instead of in
/// the parameters' gradient accumulators, whose hooks would run once per micro-batch.
class ParameterSinks {
 public:
  /// With `grad`, makes sinks, which the engine runs on `stream`, for the stage's own parameters that require grad.
  /// `stage` must outlive this.
  ParameterSinks(Stage& stage, bool grad, const std::optional<c10::Stream>& stream);

  /// The parameters that have a sink, in the order of their sums. Each large parameter has one of its own, so that its
  /// gradient is freed at once. Small ones share one, because each node costs about a microsecond.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  /// Makes the graph behind `roots` end in the sinks, and in the stand-ins where it reaches borrowed parameters. This
  /// thread must have built it since its sequence number was `begin`. Threads of a layer may have built parts that lead
  /// to inputs and parameters only. Errors: std::invalid_argument when the graph reaches another graph, or a leaf that
  /// is not a parameter of the stage and was used by an earlier cell too, because gradients would be lost there. (A
  /// layer may make a leaf in its forward and differentiate by it; only one cell uses such a leaf, unless it becomes a
  /// parameter.)
  void redirect(const torch::autograd::edge_list& roots, std::uint64_t begin, const std::vector<Borrowed>& borrowed);

  /// Runs the part of a redirected graph behind `roots`. Adds the gradients of parameters to `sums`, and those of the
  /// inputs to `entering`, per parcel; a W has neither entries nor these. Gradients of backwards inside this one, such as
  /// a reentrant checkpoint's, go there too.
  void run_backward(const RootGradients& roots, bool retain_graph, GradientSums& sums, const EntrySinks& entries,
                    std::vector<GradientSums>& entering);

  /// Gives sinks to the leaves that a loss depends on, except through `ends`, and that are not the stage's parameters.
  /// They become parameters() too. Call on the stage's worker, when the loss has been computed.
  void adopt_leaves(const at::Tensor& loss, const std::vector<NodePtr<torch::autograd::Node>>& ends);

  /// Whether each parameter of the stage has a sink.
  const std::vector<bool>& has_sink() const { return has_sink_; }
  /// The parameters that the stage borrows and lends, in its order.
  const std::vector<at::Tensor>& borrowed() const { return borrowed_; }
  const std::vector<at::Tensor>& lent() const { return lent_; }
  /// All parameters of the stage, and the ones that it owns.
  const std::vector<at::Tensor>& all() const { return all_; }
  const std::vector<at::Tensor>& own() const { return own_; }

  /// Notes samples of the values of the stage's own parameters, for check_unchanged(): LibTorch's SGD writes through
  /// Tensor.data(), which advances no version counter. Only on the CPU, because the host would wait for a device.
  void note_values();
  /// Errors: std::runtime_error if one of them has changed since.
  void check_unchanged() const;

 private:
  void add_sink(const at::Tensor& parameter, bool of_its_own);
  void check_leaf(const at::Tensor& tensor);
  torch::autograd::Edge end_of(const c10::TensorImpl* parameter) const;

  Stage& stage_;
  const std::uint64_t caller_;  // the thread that made this
  std::vector<at::Tensor> all_;
  std::vector<at::Tensor> own_;
  const std::vector<at::Tensor> borrowed_;
  const std::vector<at::Tensor> lent_;
  std::vector<VersionWatch> versions_;  // of own_, at note_values()
  std::vector<std::string> samples_;
  std::vector<bool> has_sink_;
  std::vector<at::Tensor> parameters_;
  std::vector<NodePtr<GradientSink>> sinks_;                                  // the first serves small parameters
  absl::flat_hash_map<const c10::TensorImpl*, torch::autograd::Edge> edges_;  // by parameter
};

/// Returns the accumulator of a parameter if a gradient can go there without the engine: `.grad` is defined, and the
/// parameter has no hooks. Null otherwise. Any thread.
NodePtr<torch::autograd::Node> accumulator_of(const at::Tensor& parameter);

}  // namespace gpipe
