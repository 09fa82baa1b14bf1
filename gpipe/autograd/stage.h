#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/gradient_flow.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/autograd/saved_buffers.h"
#include "gpipe/autograd/weak_tensors.h"
#include "skip/context.h"

namespace gpipe {

/// A contiguous run of layers on one device. Used by one thread at a time.
struct Stage {
  int index = 0;
  int first_layer = 0;
  std::vector<std::unique_ptr<Layer>> layers;
  RunLayers run_layers;  ///< none: one layer after the other
  c10::Device device = c10::kCPU;

  /// The skips that enter from and leave for other stages, in the order of the stage's edges behind the activation.
  std::vector<SkipKey> skips_in;
  std::vector<SkipKey> skips_out;
  /// Where the activation and the skips that leave go; the caller is the stage behind the last.
  std::vector<int> receivers;

  /// Whether what enters was seen to be changed in place, by this stage or by one that it was passed on to: then
  /// recomputed cells store a copy of it. Until the first recompute has shown, assume so.
  enum class InPlace { kUnknown, kNo, kYes } in_place = InPlace::kUnknown;

  /// Which of its outputs need gradients, and what its forwards do to buffers.
  GradientFlow gradient_flow;
  BufferHabits habits;
  /// Leaves that its layers have used and that are not its parameters.
  WeakTensorMap<std::monostate> leaves;
  /// How often its layers have written to each parameter, as an embedding with max_norm does.
  absl::flat_hash_map<const c10::TensorImpl*, std::uint32_t> own_writes;

  /// Calls a function while this thread may use the objects of the layers' language. Empty: without further ado.
  std::function<void(absl::FunctionRef<void()>)> lock;
  void locked(absl::FunctionRef<void()> call) const { lock ? lock(call) : call(); }

  /// Distinct parameters, in order of first occurrence.
  std::vector<at::Tensor> parameters() const;
  /// Distinct buffers, of those that the layers have at present.
  std::vector<at::Tensor> buffers() const;
};

/// Whether a tensor is large: 64 KiB or more.
bool is_large(const at::Tensor& tensor);

/// Where the gradients of a stage's parameters are caught during one mini-batch. A cell's graph ends in these instead
/// of in the parameters' own accumulators, whose hooks would fire once a micro-batch.
class ParameterSinks {
 public:
  /// With `grad`, makes a sink for each of the stage's parameters that require grad. The stage must outlive this.
  ParameterSinks(Stage& stage, bool grad);

  /// The parameters that have a sink; and the nodes that stand for them, whose sums have the same order. A large parameter has
  /// a node to itself, so that its gradient is added, and freed, as soon as it is there; small ones share a node, for
  /// each that the engine evaluates costs as much as a small layer.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<std::shared_ptr<GradientSink>>& sinks() const { return sinks_; }

  /// Makes the graph behind `roots`, which this thread has built since its sequence number was `begin`, end in the
  /// sinks. Errors: std::invalid_argument when it reaches another graph, or a leaf that is not a parameter of the
  /// stage and that an earlier cell has used too: gradients would be lost there. A leaf that a layer has made for itself
  /// (to differentiate inside its forward) is used by one cell only.
  void redirect(const torch::autograd::edge_list& roots, std::uint64_t begin) const;

  /// Whether each parameter of the stage has a sink.
  const std::vector<bool>& has_sink() const { return has_sink_; }
  /// All parameters of the stage, with a sink or not; and those that its own layers write to.
  const std::vector<at::Tensor>& all() const { return all_; }
  std::vector<at::Tensor> written() const;

  /// Errors: std::runtime_error when a parameter was changed in place since this was made, other than by the stage's own
  /// layers.
  void check_unchanged() const;

 private:
  std::uint32_t others_writes(const at::Tensor& parameter) const;

  Stage& stage_;
  std::vector<at::Tensor> all_;
  std::vector<std::uint32_t> versions_;  // less the stage's own writes
  std::vector<bool> has_sink_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::shared_ptr<GradientSink>> sinks_;  // first that of the small ones
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  absl::flat_hash_map<const torch::autograd::Node*, torch::autograd::Edge> edges_;  // by accumulator
};

/// For its lifetime, counts changes of parameters as writes of the stage that owns them. REQUIRES: only the stages'
/// layers write meanwhile.
class OwnWrites {
 public:
  OwnWrites(std::vector<Stage>& stages, const std::vector<ParameterSinks>& sinks);
  ~OwnWrites();
  OwnWrites(const OwnWrites&) = delete;
  OwnWrites& operator=(const OwnWrites&) = delete;

 private:
  std::vector<Stage>& stages_;
  const std::vector<ParameterSinks>& sinks_;
  std::vector<std::vector<std::uint32_t>> versions_;
};

}  // namespace gpipe
