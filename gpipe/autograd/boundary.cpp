#include "gpipe/autograd/boundary.h"

#include <ATen/SequenceNumber.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "absl/cleanup/cleanup.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/torch_internals.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

using torch::autograd::variable_list;

// Whether only this tensor has the memory, without repeats. A view may own its base, as a weight's gradient often does.
bool owns_memory(const at::Tensor& tensor) {
  if (tensor.use_count() != 1 || tensor.layout() != at::kStrided) return false;
  std::size_t users = 1;
  if (tensor.is_view()) {
    const auto base = tensor._base();
    if (base.use_count() != 2) return false;  // the view's reference, and `base`
    users = 2;
  }
  return tensor.storage().use_count() == users && tensor.is_non_overlapping_and_dense();
}

// Root node of a cell's graph: the identity. Each leaving value has its own, so that the gradients of a value that leaves
// twice sum in the order of leaving.
struct Leave : torch::autograd::Node {
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
  std::string name() const override { return "GPipeLeave"; }
};

}  // namespace

at::Tensor unshared(at::Tensor tensor) {
  const bool shared = tensor.defined() && tensor.layout() == at::kStrided && !owns_memory(tensor);
  return shared ? tensor.clone() : std::move(tensor);
}

void GradientSums::accumulate(std::size_t index, NodePtr<torch::autograd::Node> accumulator) {
  accumulators_.resize(sums_.size());
  accumulators_[index] = std::move(accumulator);
}

void GradientSums::add(std::size_t index, at::Tensor gradient) {
  if (!gradient.defined()) return;
  if (index < accumulators_.size() && accumulators_[index]) {
    (*accumulators_[index])({std::move(gradient)});
    return;
  }
  auto& sum = sums_[index];
  if (!sum.defined()) {
    sum = std::move(gradient);
    owned_[index] = owns_memory(sum);
  } else if (owned_[index] && sum.layout() == gradient.layout()) {
    sum.add_(gradient);
  } else {
    const bool is_refused = sum.is_sparse() && !gradient.is_sparse();  // by PyTorch, as sparse + dense
    sum = is_refused ? gradient + sum : sum + gradient;
    owned_[index] = true;
  }
}

Gradients GradientSums::take_unshared() {
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    if (!owned_[i]) sums_[i] = unshared(std::move(sums_[i]));
  }
  return std::move(sums_);
}

GradientSink::GradientSink()
    : Node(std::numeric_limits<std::uint64_t>::max()), made(at::sequence_number::get_and_increment()) {}

variable_list GradientSink::apply(variable_list&& gradients) {
  TORCH_CHECK(sums != nullptr,
              "[gpipe] a backward reached the graph inside a pipeline through a tensor that a layer kept from its "
              "forward; keep a detached tensor instead");
  for (std::size_t i = 0; i < gradients.size(); ++i) sums->add(indices[i], std::move(gradients[i]));
  return {};
}

at::Tensor enter(const at::Tensor& tensor) {
  auto entering = tensor.detach();
  torch::autograd::set_history(entering, make_node<GradientSink>());
  return entering;
}

Value append_node(const Value& value, const NodePtr<torch::autograd::Node>& node) {
  auto tensors = value.tensors();
  for (auto& tensor : tensors) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
    tensor = tensor.detach();
    torch::autograd::set_history(tensor, node);
  }
  return Value(value.form(), std::move(tensors));
}

torch::autograd::Edge leave(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return {};
  auto node = make_node<Leave>();
  node->add_input_metadata(tensor);
  node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
  return {std::move(node), 0};
}

namespace {

bool is_batched(const at::Tensor& tensor) {
  using c10::DispatchKey;
  return tensor.defined() &&
         tensor.key_set().has_any(c10::DispatchKeySet({DispatchKey::Batched, DispatchKey::FuncTorchBatched}));
}

c10::impl::VirtualGuardImpl guard_on(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

c10::Stream make_current(c10::Stream stream) { return guard_on(stream.device()).exchangeStream(stream); }

class PipelineNode : public torch::autograd::Node {
 public:
  PipelineNode(BackwardFunction function, const std::vector<c10::Device>& devices) : function_(std::move(function)) {
    for (const auto device : devices) {
      if (device.is_cpu()) continue;
      const auto stream = guard_on(device).getStream(device);
      if (std::ranges::find(streams_, stream) == streams_.end()) streams_.push_back(stream);
    }
  }

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                                "[gpipe] a pipeline cannot be differentiated twice; call backward or grad without "
                                "create_graph, and compute a gradient penalty with the plain model");
    TORCH_CHECK_NOT_IMPLEMENTED(std::ranges::none_of(gradients, is_batched),
                                "[gpipe] the backward of a pipeline cannot run under vmap, so not with "
                                "is_grads_batched; call it once per gradient, with retain_graph");
    std::lock_guard<std::mutex> lock(mutex_);  // of Node: several threads may run one graph
    TORCH_CHECK(function_,
                "[gpipe] trying to backward through a pipeline a second time, after its first backward freed the "
                "activations or failed; pass retain_graph to the first backward, or run the forward again");
    const bool retain_graph = torch::autograd::get_current_graph_task_keep_graph();
    // A failed backward cannot be repeated, because it has used up part of its cells.
    auto function = std::exchange(function_, nullptr);
    // The engine sets the stream of one device only.
    std::vector<c10::Stream> previous;
    previous.reserve(streams_.size());
    const absl::Cleanup restore = [&] { std::for_each(previous.rbegin(), previous.rend(), make_current); };
    for (const auto& stream : streams_) previous.push_back(make_current(stream));
    auto result = call(function, std::move(gradients), retain_graph);
    if (retain_graph) function_ = std::move(function);
    return result;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    function_ = nullptr;
  }

  std::string name() const override { return "GPipeBackward"; }

 private:
  // The engine supports only std::exception: others leave its nesting depth wrong.
  static variable_list call(const BackwardFunction& function, variable_list&& gradients, bool retain_graph) try {
    return function(std::move(gradients), retain_graph);
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    throw_error("a layer threw an object that is not a std::exception");
  }

  BackwardFunction function_;
  std::vector<c10::Stream> streams_;  // that were current when this was made
};

// Wraps a leaf's hook and calls it only if the leaf gets a gradient. The pipeline's node has an edge to every
// parameter, so the engine also reaches parameters that the outputs do not depend on.
class SkipUndefinedHook : public torch::autograd::FunctionPreHook {
 public:
  explicit SkipUndefinedHook(std::unique_ptr<FunctionPreHook> hook) : hook_(std::move(hook)) {}

  variable_list operator()(const variable_list& gradients) override {
    return gradients.front().defined() ? (*hook_)(gradients) : gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& arguments) const override {
    hook_->compiled_args(arguments);
  }

 private:
  const std::unique_ptr<FunctionPreHook> hook_;
};

thread_local const TakeGradient* current_take = nullptr;

class CatchHook : public torch::autograd::FunctionPreHook {
 public:
  explicit CatchHook(c10::TensorImpl* leaf) : leaf_(leaf) {}

  variable_list operator()(const variable_list& gradients) override {
    if (current_take == nullptr || !gradients.front().defined()) return gradients;
    const bool is_taken = !is_captured() && (*current_take)(leaf_, gradients.front());
    return is_taken ? variable_list(1) : gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  // Whether autograd::grad() returns the gradient.
  bool is_captured() const {
    const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
    if (wanted == nullptr || wanted->empty()) return false;
    const at::Tensor leaf(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(leaf_));
    const auto found = wanted->find(torch::autograd::impl::try_get_grad_accumulator(leaf).get());
    return found != wanted->end() && found->second.captures_ != nullptr;
  }

  c10::TensorImpl* const leaf_;  // has this hook
};

// Runs an empty backward: until a thread's next one, the engine keeps the graph and gradients of one that failed.
void clear_failed_backward() noexcept try {
  torch::autograd::Engine::get_default_engine().execute({}, {}, false, false, true);
} catch (...) {
}

bool is_ours(const std::unique_ptr<torch::autograd::FunctionPreHook>& hook) {
  return dynamic_cast<SkipUndefinedHook*>(hook.get()) != nullptr || dynamic_cast<CatchHook*>(hook.get()) != nullptr;
}

void wrap_hooks(const at::Tensor& leaf) {
  for (auto& hook : torch::autograd::impl::hooks(leaf)) {
    if (!is_ours(hook)) hook = std::make_unique<SkipUndefinedHook>(std::move(hook));
  }
}

// Returns the inputs' edges; on other accelerators through an identity there: the engine sets one device's stream per
// node.
torch::autograd::edge_list edges_to(const std::vector<at::Tensor>& inputs, c10::Device device) {
  auto edges = torch::autograd::collect_next_edges(inputs);
  std::unordered_map<c10::Device, NodePtr<Leave>> nodes;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!edges[i].is_valid()) continue;
    const auto on = inputs[i].device();
    if (on.is_cpu() || on == device) continue;
    auto& node = nodes[on];
    if (!node) node = make_node<Leave>();
    node->add_next_edge(std::move(edges[i]));
    edges[i] = {node, node->add_input_metadata(inputs[i])};
  }
  return edges;
}

}  // namespace

void run_backward(const RootGradients& roots, bool retain_graph, TakeGradient take) {
  auto& engine = torch::autograd::Engine::get_default_engine();
  const absl::Cleanup put_back = [outer = std::exchange(current_take, &take)] { current_take = outer; };
  try {
    engine.execute(roots.edges, roots.gradients, retain_graph, /*create_graph=*/false, /*accumulate_grad=*/true);
  } catch (...) {
    clear_failed_backward();
    throw;
  }
}

void catch_gradients(const at::Tensor& leaf) {
  wrap_hooks(leaf);
  auto& hooks = torch::autograd::impl::hooks(leaf);
  if (!hooks.empty() && dynamic_cast<CatchHook*>(hooks.front().get()) != nullptr) return;
  hooks.insert(hooks.begin(), std::make_unique<CatchHook>(leaf.unsafeGetTensorImpl()));
}

void attach_backward(const std::vector<at::Tensor>& outputs, const std::vector<bool>& differentiable,
                     const std::vector<at::Tensor>& inputs, std::vector<c10::Device> devices,
                     BackwardFunction function) {
  std::optional<c10::Device> first;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!differentiable[i]) continue;
    if (!first && !outputs[i].is_cpu()) first = outputs[i].device();
    devices.push_back(outputs[i].device());
  }
  auto node = make_node<PipelineNode>(std::move(function), devices);
  node->set_next_edges(edges_to(inputs, first.value_or(c10::kCPU)));
  for (const auto& input : inputs) {
    if (input.requires_grad() && input.is_leaf()) wrap_hooks(input);
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (differentiable[i]) {
      torch::autograd::set_history(outputs[i], node);
    } else {
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    }
  }
}

}  // namespace gpipe
