#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/layer.h"
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

  /// Whether what enters was seen to be changed in place, by this stage or by one that it was passed on to: then
  /// recomputed cells store a copy of it. Until the first recompute has shown, assume so.
  enum class InPlace { kUnknown, kNo, kYes } in_place = InPlace::kUnknown;

  /// Distinct parameters, in order of first occurrence.
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> buffers() const;
};

/// Where the gradients of a stage's parameters are caught during one mini-batch. A cell's graph ends in these instead
/// of in the parameters' own accumulators, whose hooks would fire once a micro-batch.
class ParameterCaptures {
 public:
  /// Whether a parameter is large.
  static bool has_its_own(const at::Tensor& parameter);

  /// Captures those that require grad.
  explicit ParameterCaptures(const std::vector<at::Tensor>& parameters);

  /// The captured parameters; and the nodes that stand for them, whose sums have the same order. A large parameter has
  /// a node to itself, so that its gradient is added, and freed, as soon as it is there; small ones share a node, for
  /// each that the engine evaluates costs as much as a small layer.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<std::shared_ptr<Capture>>& captures() const { return captures_; }

  /// Makes the graph behind `roots`, which this thread has built since its sequence number was `begin`, end in the
  /// captures. Errors: std::invalid_argument when it reaches a tensor that requires grad but is neither a parameter of
  /// the stage nor an input of the cell, or another graph: gradients would be lost there.
  void redirect(const torch::autograd::edge_list& roots, std::uint64_t begin) const;

  /// Errors: std::runtime_error when a parameter, captured or not, was changed in place since this was made.
  void check_unchanged() const;

 private:
  std::vector<at::Tensor> all_;
  std::vector<std::uint32_t> versions_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::shared_ptr<Capture>> captures_;  // first that of the small ones
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  absl::flat_hash_map<const torch::autograd::Node*, torch::autograd::Edge> edges_;  // by accumulator
};

/// A copy of buffers, to put back what a recompute or a failed forward has written.
class SavedBuffers {
 public:
  explicit SavedBuffers(std::vector<at::Tensor> buffers);
  /// Writes without a trace in version counters, which graphs in flight would mistake for a change.
  void restore();
  /// The same while an exception is under way, which matters more than one of its own.
  void restore_after_error() noexcept;

 private:
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> copies_;
};

}  // namespace gpipe
