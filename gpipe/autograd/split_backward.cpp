#include "gpipe/autograd/split_backward.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <typeinfo>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

using GraphEdge = torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Fewest multiplications per row of the output that are worth a second run of the node. Independent of the number of
// rows, so that all micro-batches of a mini-batch, which may have different sizes, split alike.
constexpr std::int64_t kLeastWork = std::int64_t{1} << 12;

/// The edges of a node's two factors.
using Factors = std::array<std::size_t, 2>;

/// Whether the node is a Product whose two saved factors have no hooks: each run of the node would run them, and they
/// may be a user's code, such as a recompute by torch.utils.checkpoint.
template <class Product>
bool is_plain(const Node& node, SavedVariable Product::*one, SavedVariable Product::*other) {
  if (typeid(node) != typeid(Product)) return false;
  const auto& product = static_cast<const Product&>(node);
  return !(product.*one).has_hooks() && !(product.*other).has_hooks();
}

/// Returns the factors of a matrix product or convolution, if the node is one: its kernels compute each gradient apart.
std::optional<Factors> factors_of(const Node& node) {
  using namespace torch::autograd::generated;
  const bool behind_a_term = is_plain(node, &AddmmBackward0::mat1_, &AddmmBackward0::mat2_) ||
                             is_plain(node, &BaddbmmBackward0::batch1_, &BaddbmmBackward0::batch2_);
  if (behind_a_term) return Factors{1, 2};
  const bool in_front =
      is_plain(node, &MmBackward0::self_, &MmBackward0::mat2_) ||
      is_plain(node, &BmmBackward0::self_, &BmmBackward0::mat2_) ||
      is_plain(node, &LinearBackward0::input_, &LinearBackward0::weight_) ||
      is_plain(node, &ConvolutionBackward0::input_, &ConvolutionBackward0::weight_) ||
      is_plain(node, &ConvolutionOverrideableBackward0::input_, &ConvolutionOverrideableBackward0::weight_);
  return in_front ? std::optional(Factors{0, 1}) : std::nullopt;
}

/// Whether a factor of the node is applied at each of several places of a sample.
bool is_convolution(const Node& node) {
  using namespace torch::autograd::generated;
  return typeid(node) == typeid(ConvolutionBackward0) || typeid(node) == typeid(ConvolutionOverrideableBackward0);
}

// These nodes save no tensor, so nothing that is changed between I and W can change their result.
bool is_view_or_cast(const Node& node) {
  static const auto* const names = new absl::flat_hash_set<std::string_view>(
      {"TBackward0", "TransposeBackward0", "TransposeBackward1", "PermuteBackward0", "ViewBackward0",
       "UnsafeViewBackward0", "AliasBackward0", "ExpandBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
       "SqueezeBackward1", "SqueezeBackward2", "SliceBackward0", "SelectBackward0", "SplitBackward0",
       "SplitWithSizesBackward0", "UnbindBackward0", "CloneBackward0", "ToCopyBackward0"});
  return names->contains(node.name());
}

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

// The sizes of a node's input; empty if they are not known.
std::vector<std::int64_t> sizes_of(const Node& node, std::size_t input) {
  const auto& metadata = node.input_metadata(input);
  std::vector<std::int64_t> sizes;
  if (metadata.was_default_constructed() || metadata.is_nested_tensor()) return sizes;
  for (const auto& size : metadata.shape_as_dim_vector()) sizes.push_back(size.maybe_as_int().value_or(0));
  return sizes;
}

// The nodes of a graph, and those of them to defer.
class Plan {
 public:
  Plan(const edge_list& roots, const EntrySinks& inputs) {
    for (const auto& of_parcel : inputs) {
      for (const auto& sink : of_parcel) {
        if (sink) leads_to_input_[sink.get()] = true;
      }
    }
    for (const auto& root : roots) {
      if (root.is_valid()) visit(root.function.get());
    }
    while (drop_shared(roots)) {
    }
  }

  /// Each after the nodes that it leads to; without sinks.
  const std::vector<Node*>& nodes() const { return nodes_; }
  bool defers_any() const { return !deferred_.empty(); }
  bool defers(const Node* node) const { return deferred_.contains(node); }
  bool leads_to_input(const GraphEdge& edge) const {
    const auto found = leads_to_input_.find(edge.function.get());
    return found != leads_to_input_.end() && found->second;
  }

 private:
  // A node, or one input of a sink.
  using Target = std::pair<const Node*, std::uint32_t>;

  static Target target_of(const GraphEdge& edge) {
    return {edge.function.get(), edge.function->num_outputs() > 0 ? 0 : edge.input_nr};
  }

  // Iterative, because graphs are deep.
  void visit(Node* first) {
    std::vector<std::pair<Node*, std::size_t>> path;
    const auto enter = [&](Node* node) {
      if (node->num_outputs() > 0 && leads_to_input_.try_emplace(node, false).second) path.emplace_back(node, 0);
    };
    enter(first);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < node->num_outputs()) {
        const auto& edge = node->next_edge(next++);
        if (edge.is_valid()) enter(edge.function.get());
        continue;
      }
      Node* const done = node;
      path.pop_back();
      nodes_.push_back(done);
      const auto leads = [&](const GraphEdge& edge) { return leads_to_input(edge); };
      if (std::ranges::none_of(done->next_edges(), leads)) continue;
      leads_to_input_[done] = true;
      if (can_defer(*done)) deferred_.insert(done);
    }
  }

  bool can_defer(Node& node) const {
    const auto factors = factors_of(node);
    if (!factors || has_hooks(node)) return false;
    // One factor leads to an input, the other to a parameter. One without a gradient may be a buffer, and change by W.
    const auto& edges = node.next_edges();
    const auto [one, other] = *factors;
    if (!edges[one].is_valid() || !edges[other].is_valid()) return false;
    if (leads_to_input(edges[one]) == leads_to_input(edges[other])) return false;
    for (const auto& edge : edges) {
      if (edge.is_valid() && !leads_to_input(edge) && elements_of_parameter(edge) == 0) return false;
    }
    auto work = elements_of_parameter(edges[leads_to_input(edges[one]) ? other : one]);
    if (is_convolution(node)) {
      const auto sizes = sizes_of(node, 0);
      for (std::size_t d = 2; d < sizes.size(); ++d) work *= sizes[d];
    }
    return work >= kLeastWork;
  }

  // The size of the parameter that an edge leads to through views and casts; 0 if it leads elsewhere.
  static std::int64_t elements_of_parameter(GraphEdge edge) {
    while (edge.function->num_outputs() > 0) {
      if (!is_view_or_cast(*edge.function)) return 0;
      edge = edge.function->next_edge(0);
      if (!edge.is_valid()) return 0;
    }
    if (dynamic_cast<const GradientSink*>(edge.function.get()) == nullptr) return 0;
    const auto sizes = sizes_of(*edge.function, edge.input_nr);
    return sizes.empty() ? 0 : c10::multiply_integers(sizes);
  }

  // Drops deferred nodes that share parameters, or views of them, with I. Returns whether there were any.
  bool drop_shared(const edge_list& roots) {
    if (deferred_.empty()) return false;
    absl::flat_hash_set<Target> early;  // what runs in I and leads to no input
    for (const auto& root : roots) {
      if (root.is_valid() && !leads_to_input(root)) early.insert(target_of(root));
    }
    for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
      const bool runs_in_full = leads_to_input_.at(*node) ? !defers(*node) : early.contains(Target(*node, 0));
      if (!runs_in_full) continue;
      for (const auto& edge : (*node)->next_edges()) {
        if (edge.is_valid() && !leads_to_input(edge)) early.insert(target_of(edge));
      }
    }
    const auto shares = [&](GraphEdge edge) {
      while (edge.is_valid() && !early.contains(target_of(edge))) {
        if (edge.function->num_outputs() == 0) return false;
        edge = edge.function->next_edge(0);
      }
      return edge.is_valid();
    };
    return absl::erase_if(deferred_, [&](const Node* node) {
             return std::ranges::any_of(node->next_edges(), [&](const GraphEdge& edge) {
               return edge.is_valid() && !leads_to_input(edge) && shares(edge);
             });
           }) > 0;
  }

  absl::flat_hash_map<const Node*, bool> leads_to_input_;
  std::vector<Node*> nodes_;
  absl::flat_hash_set<const Node*> deferred_;
};

}  // namespace

/// Takes the place of a deferred node in I. Runs it without its edges to parameters, and keeps its incoming gradients.
/// The engine releases the saved tensors of a node that it has run, but knows only this one.
struct SplitBackward::Deferred : Node {
  Deferred(NodePtr<Node> deferred, const Plan& plan)
      : Node(deferred->sequence_nr()), node(std::move(deferred)), edges_to_parameters(node->num_outputs()) {
    for (std::size_t i = 0; i < node->num_inputs(); ++i) input_metadata_.push_back(node->input_metadata(i));
    next_edges_ = node->next_edges();
    for (std::size_t i = 0; i < next_edges_.size(); ++i) {
      if (!next_edges_[i].is_valid() || plan.leads_to_input(next_edges_[i])) continue;
      edges_to_parameters[i] = std::exchange(next_edges_[i], GraphEdge());
      node->next_edges()[i] = GraphEdge();
    }
  }

  variable_list apply(variable_list&& incoming) override {
    gradients = incoming;
    return (*node)(std::move(incoming));
  }
  std::string name() const override { return "GPipeDeferred"; }

  NodePtr<Node> node;
  edge_list edges_to_parameters;
  variable_list gradients;
};

SplitBackward::SplitBackward(const edge_list& roots, const EntrySinks& inputs) {
  const Plan plan(roots, inputs);
  if (!plan.defers_any()) return;
  absl::flat_hash_map<const Node*, NodePtr<Deferred>> in_place_of;
  for (Node* node : plan.nodes()) {
    for (const auto& edge : node->next_edges()) {
      if (!edge.is_valid() || !plan.defers(edge.function.get())) continue;
      auto& deferred = in_place_of[edge.function.get()];
      if (deferred) continue;
      deferred = make_node<Deferred>(edge.function, plan);
      deferred_.push_back(deferred);
    }
  }
  const auto redirect = [&](edge_list& edges) {
    for (auto& edge : edges) {
      const auto found = in_place_of.find(edge.function.get());
      if (found != in_place_of.end()) edge.function = found->second;
    }
  };
  for (Node* node : plan.nodes()) {
    redirect(node->next_edges());
    // The node of an in-place operation on a view forwards to the operation's own node: keep their edges equal.
    auto* slices = dynamic_cast<torch::autograd::CopySlices*>(node);
    for (std::size_t i = 1; slices != nullptr && i < slices->num_outputs(); ++i) {
      slices->fn->next_edges()[i] = slices->next_edge(i);
    }
  }
  for (auto& deferred : deferred_) redirect(deferred->next_edges());
}

// Deferred nodes hold each other by edges and by the history of saved tensors. Destroys them one by one, those next to
// the roots first. Otherwise the destructor of a long chain would exhaust the stack.
SplitBackward::~SplitBackward() {
  edge_list nodes;
  for (auto& deferred : deferred_) {
    deferred->next_edges().clear();
    deferred->node->next_edges().clear();
    nodes.emplace_back(std::move(deferred->node), 0);
  }
  while (!nodes.empty()) nodes.pop_back();
}

bool SplitBackward::end_inputs() {
  for (auto& deferred : deferred_) {
    deferred->next_edges() = edge_list(deferred->num_outputs());
    deferred->node->next_edges() = std::move(deferred->edges_to_parameters);
  }
  std::erase_if(deferred_,
                [](const auto& deferred) { return std::ranges::none_of(deferred->gradients, &at::Tensor::defined); });
  return !deferred_.empty();
}

bool SplitBackward::reads(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  for (const auto& deferred : deferred_) {
    for (const auto& gradient : deferred->gradients) {
      if (gradient.defined() && gradient.has_storage() && gradient.is_alias_of(tensor)) return true;
    }
  }
  return false;
}

RootGradients SplitBackward::take_weights() {
  RootGradients weights;
  for (auto deferred = deferred_.rbegin(); deferred != deferred_.rend(); ++deferred) {  // see the destructor
    const auto node = std::move((*deferred)->node);
    auto& gradients = (*deferred)->gradients;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      weights.edges.emplace_back(node, static_cast<std::uint32_t>(i));
      weights.gradients.push_back(std::move(gradients[i]));
    }
  }
  deferred_.clear();
  return weights;
}

}  // namespace gpipe
