#include "gpipe/autograd/parameter_sinks.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_set.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

using torch::autograd::edge_list;
using torch::autograd::Node;

// Whether this thread has made a node.
bool made_here(const Node& node) { return node.thread_id() == at::RecordFunction::currentThreadId(); }

// The bytes of a few elements, also the first and the last; none outside of the CPU.
std::string sample_of(const at::Tensor& tensor) {
  constexpr std::int64_t kElements = 8;
  std::string bytes;
  if (!tensor.is_cpu() || !has_plain_memory(tensor) || tensor.numel() == 0) return bytes;
  const auto last = tensor.is_non_overlapping_and_dense() ? tensor.numel() - 1 : 0;
  const auto size = tensor.element_size();
  for (std::int64_t i = 0; i < kElements; ++i) {
    bytes.append(static_cast<const char*>(tensor.const_data_ptr()) + i * last / (kElements - 1) * size, size);
  }
  return bytes;
}

[[noreturn]] void refuse_foreign(const Node& node) {
  refuse_argument(
      "a layer uses a tensor whose graph (", node.name(),
      ") was built outside this forward of this micro-batch; detach tensors that a layer keeps between calls");
}

}  // namespace

ParameterSinks::ParameterSinks(Stage& stage, bool grad, const std::optional<c10::Stream>& stream)
    : stage_(stage),
      caller_(at::RecordFunction::currentThreadId()),
      all_(stage.parameters()),
      borrowed_(stage.parameters(stage.borrowed)),
      lent_(stage.parameters(stage.lent)),
      sinks_{make_node<GradientSink>()} {
  // The engine runs a node on the stream that is current when its input metadata is added.
  const c10::OptionalStreamGuard scope(stream);
  for (const auto& parameter : all_) {
    const bool is_borrowed = index_of(parameter, borrowed_) < borrowed_.size();
    has_sink_.push_back(false);
    if (!is_borrowed) own_.push_back(parameter);
    if (!grad || !parameter.requires_grad()) continue;
    if (!parameter.is_leaf()) {
      refuse_argument("a parameter is not a leaf; parameters are made by register_parameter");
    }
    catch_gradients(parameter);
    if (is_borrowed) continue;
    has_sink_.back() = true;
    add_sink(parameter, is_large(parameter));
  }
}

void ParameterSinks::add_sink(const at::Tensor& parameter, bool of_its_own) {
  auto sink = of_its_own ? sinks_.emplace_back(make_node<GradientSink>()) : sinks_.front();
  sink->indices.push_back(parameters_.size());
  const auto input = sink->add_input_metadata(parameter);
  parameters_.push_back(parameter);
  edges_.emplace(parameter.unsafeGetTensorImpl(), torch::autograd::Edge(std::move(sink), input));
}

torch::autograd::Edge ParameterSinks::end_of(const c10::TensorImpl* parameter) const {
  const auto found = edges_.find(parameter);
  return found == edges_.end() ? torch::autograd::Edge() : found->second;
}

void ParameterSinks::adopt_leaves(const at::Tensor& loss, const std::vector<NodePtr<Node>>& ends) {
  absl::flat_hash_set<const Node*> seen;
  for (const auto& end : ends) seen.insert(end.get());
  std::vector<NodePtr<Node>> pending;
  const auto visit = [&](const NodePtr<Node>& node) {
    if (node && seen.insert(node.get()).second) pending.push_back(node);
  };
  visit(loss.grad_fn());
  while (!pending.empty()) {
    const auto node = std::move(pending.back());
    pending.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function);
    const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
    if (leaf == nullptr || edges_.contains(leaf->variable.unsafeGetTensorImpl())) continue;
    if (index_of(leaf->variable, all_) == all_.size()) add_sink(leaf->variable, /*of_its_own=*/true);
  }
}

void ParameterSinks::run_backward(const RootGradients& roots, bool retain_graph, GradientSums& sums,
                                  const EntrySinks& entries, std::vector<GradientSums>& entering) {
  const auto connect = [&](bool runs) {
    for (std::size_t p = 0; p < entries.size(); ++p) {
      for (const auto& sink : entries[p]) {
        if (sink) sink->sums = runs ? &entering[p] : nullptr;
      }
    }
    for (const auto& sink : sinks_) sink->sums = runs ? &sums : nullptr;
  };
  const auto take = [&](const c10::TensorImpl* leaf, const at::Tensor& gradient) {
    auto end = end_of(leaf);
    const auto lenders = entries.end() - (entries.empty() ? 0 : std::ssize(borrowed_));
    for (std::size_t k = 0; k < borrowed_.size() && !entries.empty(); ++k) {
      if (borrowed_[k].unsafeGetTensorImpl() == leaf) end = {lenders[k].front(), 0};
    }
    if (!end.is_valid()) return false;
    auto& sink = static_cast<GradientSink&>(*end.function);
    sink.sums->add(sink.indices[end.input_nr], gradient);
    return true;
  };
  connect(true);
  const absl::Cleanup disconnect = [&] { connect(false); };
  gpipe::run_backward(roots, retain_graph, take);
}

void ParameterSinks::note_values() {
  versions_ = {own_.begin(), own_.end()};
  samples_.clear();
  for (const auto& parameter : own_) samples_.push_back(sample_of(parameter));
}

void ParameterSinks::check_unchanged() const {
  bool has_changed = std::ranges::any_of(versions_, &VersionWatch::changed);
  for (std::size_t i = 0; i < samples_.size(); ++i) {
    has_changed = has_changed || sample_of(own_[i]) != samples_[i];
  }
  if (!has_changed) return;
  throw_error(
      "a parameter was changed in place between the forward and its backward, so the forward cannot be recomputed; "
      "step the optimizer after the backward");
}

NodePtr<Node> accumulator_of(const at::Tensor& parameter) {
  // An accumulator holds its lock while it writes `.grad`, on any thread.
  struct Locked : Node {
    static std::mutex& of(Node& node) { return node.*(&Locked::mutex_); }
  };
  auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
  const bool has_hooks = torch::autograd::impl::hooks(parameter).size() > 1 ||  // the first is of catch_gradients()
                         torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr ||
                         !accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty();
  if (has_hooks) return nullptr;
  const std::lock_guard<std::mutex> lock(Locked::of(*accumulator));
  const auto& gradient = parameter.grad();
  return gradient.defined() && !gradient.requires_grad() ? accumulator : nullptr;
}

void ParameterSinks::redirect(const edge_list& roots, std::uint64_t begin, const std::vector<Borrowed>& borrowed) {
  // Where an edge to a parameter's accumulator shall lead; invalid for other nodes.
  const auto end_at = [&](const torch::autograd::AccumulateGrad* leaf) {
    if (leaf == nullptr) return torch::autograd::Edge();
    for (const auto& [parameter, stand_in] : borrowed) {
      if (leaf->variable.is_same(parameter)) return torch::autograd::impl::gradient_edge(stand_in);
    }
    return end_of(leaf->variable.unsafeGetTensorImpl());
  };
  absl::flat_hash_set<Node*> seen;
  std::vector<Node*> pending;
  std::vector<const torch::autograd::AccumulateGrad*> leaves;
  const auto visit = [&](Node* node) {
    if (seen.insert(node).second) pending.push_back(node);
  };
  for (const auto& root : roots) {
    if (root.is_valid()) visit(root.function.get());
  }
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    for (std::size_t i = 0; i < node->next_edges().size(); ++i) {
      auto& edge = node->next_edges()[i];
      if (!edge.is_valid()) continue;
      const bool inner = edge.function->num_outputs() > 0;
      const auto* sink = inner ? nullptr : dynamic_cast<GradientSink*>(edge.function.get());
      if (inner || sink != nullptr) {
        auto& next = *edge.function;
        const bool is_older = (sink != nullptr ? sink->made : next.sequence_nr()) < begin;
        if (made_here(next) ? is_older : sink != nullptr || next.thread_id() == caller_) refuse_foreign(next);
        visit(&next);
        continue;
      }
      auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
      if (auto end = end_at(leaf); end.is_valid()) {
        edge = std::move(end);
        // The node of an in-place operation on a view forwards to the operation's own node: keep their edges equal.
        if (auto* slices = dynamic_cast<torch::autograd::CopySlices*>(node)) {
          slices->fn->set_next_edge(i, edge);
        }
      } else if (leaf != nullptr) {
        if (!made_here(*node)) refuse_foreign(*node);
        if (std::ranges::find(leaves, leaf) == leaves.end()) leaves.push_back(leaf);
      }
    }
  }
  for (const auto* leaf : leaves) check_leaf(leaf->variable);
}

void ParameterSinks::check_leaf(const at::Tensor& tensor) {
  absl::erase_if(stage_.leaves, [](const auto& leaf) { return leaf.second.expired(); });
  for (const auto& layer : stage_.layers) {
    const auto of_layer = layer->parameters();
    if (index_of(tensor, of_layer) == of_layer.size()) continue;
    refuse_argument("layer '", layer->name(),
                    "' made a parameter in a forward; run the model once before the pipeline is made");
  }
  const WeakTensor weak(tensor.getIntrusivePtr());
  if (stage_.leaves.emplace(tensor.unsafeGetTensorImpl(), weak).second) return;
  refuse_argument("a layer uses a tensor of shape ", c10::str(tensor.sizes()),
                  " that requires grad but is neither a parameter nor an input; register it with register_parameter, "
                  "pass it through the model, or detach it");
}

}  // namespace gpipe
