#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {

/// Returns the tensor itself if no other tensor shares its memory, otherwise a clone: PyTorch adds in place to the
/// gradient of a leaf. The caller must give up its reference.
at::Tensor unshared(at::Tensor tensor);

/// Sums of gradients, each in the order of add().
class GradientSums {
 public:
  explicit GradientSums(std::size_t count = 0) : sums_(count), owned_(count) {}

  /// Makes sums for `count` indices.
  void resize(std::size_t count) {
    sums_.resize(count);
    owned_.resize(count);
  }

  /// Lets add() give the gradients of `index` to a parameter's accumulator, which adds them to `.grad`.
  void accumulate(std::size_t index, NodePtr<torch::autograd::Node> accumulator);
  /// Undefined gradients are skipped. A sum without gradients stays undefined.
  void add(std::size_t index, at::Tensor gradient);
  /// Returns the sums and ends their use.
  Gradients take() { return std::move(sums_); }
  /// As take(), with sums that share memory with no other tensor; see unshared().
  Gradients take_unshared();

 private:
  Gradients sums_;
  std::vector<bool> owned_;  // whether the sum's memory belongs to it alone, so that add() may write to it
  std::vector<NodePtr<torch::autograd::Node>> accumulators_;  // for the first sums; null for one that is summed here
};

/// Sink of a cell's graph, for inputs and parameters. Adds incoming gradients to `sums`. Runs before other ready nodes.
struct GradientSink : torch::autograd::Node {
  GradientSink();

  /// Its place in the sequence of nodes that its thread has made.
  const std::uint64_t made;
  /// The index in `sums` of each input of the node.
  std::vector<std::size_t> indices;
  /// The sums of the running backward; null between backwards.
  GradientSums* sums = nullptr;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "GPipeGradientSink"; }
};

/// The sinks of a cell's inputs, per parcel and tensor; null where no gradient flows.
using EntrySinks = std::vector<std::vector<NodePtr<GradientSink>>>;

/// Where a backward begins: nodes' inputs, and a gradient for each.
struct RootGradients {
  torch::autograd::edge_list edges;
  torch::autograd::variable_list gradients;
};

/// Offers the gradient of a leaf; returns whether it was taken.
using TakeGradient = absl::FunctionRef<bool(const c10::TensorImpl* leaf, const at::Tensor& gradient)>;

/// Runs a cell's graph on this thread. `take` is offered gradients of leaves of catch_gradients() before they reach
/// `.grad`: a backward inside this one, such as a reentrant checkpoint's, runs on a graph of its own, which ends in the
/// parameters.
void run_backward(const RootGradients& roots, bool retain_graph, TakeGradient take);

/// Adds a hook to a leaf, once, in front of its other hooks, which are not called for undefined gradients from then on.
/// REQUIRES: no backward of the leaf runs, if the hook is new.
void catch_gradients(const at::Tensor& leaf);

/// Returns an input of a cell: shares memory with `tensor`, requires grad, and is neither a leaf nor a view, so that
/// in-place operations work on it. Its node is a GradientSink; the caller sets its indices.
at::Tensor enter(const at::Tensor& tensor);

/// Inserts `node` behind `value`: returns its tensors detached, with `node` as the history of those that require grad,
/// and makes their former history the next edges of `node`, in order.
Value append_node(const Value& value, const NodePtr<torch::autograd::Node>& node);

/// Returns the root edge of a leaving tensor; invalid if it does not require grad.
torch::autograd::Edge leave(const at::Tensor& tensor);

/// A pipeline's backward: takes the gradients of its outputs (undefined for zero) and returns those of its inputs. With
/// `retain_graph` it must be repeatable. Called by the autograd engine.
using BackwardFunction = std::function<std::vector<at::Tensor>(std::vector<at::Tensor> gradients, bool retain_graph)>;

/// Makes one autograd node the history of those `outputs` that are `differentiable`. Its `inputs` are the pipeline's
/// inputs and parameters, so that autograd::grad, hooks and DDP see each of them once. The function lives until a
/// backward without retain_graph, or as long as the graph. It runs on the streams that are current now on `devices` and
/// on the outputs' devices. REQUIRES: outputs are detached. Errors, in backward: c10::NotImplementedError for
/// create_graph; c10::Error for a second backward without retain_graph; what the function throws, or std::runtime_error
/// if that is not a std::exception.
void attach_backward(const std::vector<at::Tensor>& outputs, const std::vector<bool>& differentiable,
                     const std::vector<at::Tensor>& inputs, std::vector<c10::Device> devices,
                     BackwardFunction function);

}  // namespace gpipe
