#include "tests/gpipe/reference.h"

#include <torch/csrc/autograd/engine.h>

#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/run/step_input.h"
#include "skip/layout.h"

namespace gpipe {
namespace {

using torch::autograd::edge_list;
using torch::autograd::variable_list;

/// Does to the graph what a boundary does: adds an identity node and returns a tensor that is neither leaf nor view.
Tensor cross(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto crossed = tensor.detach();
  if (tensor.requires_grad()) torch::autograd::impl::set_gradient_edge(crossed, leave(tensor));
  return crossed;
}

/// Passes skips on. A tensor crosses a boundary for each edge of its skip.
class CrossingContext : public SkipContext {
 public:
  /// `keys` has the skip of each edge.
  CrossingContext(const std::vector<Edge>& edges, const std::vector<SkipKey>& keys) : edges_(edges), keys_(keys) {}

  void enter_stage(int stage) {
    for (std::size_t e = 0; e < edges_.size(); ++e) {
      if (edges_[e].from == stage_) arriving_[e] = cross(sent_.at(keys_[e]));
    }
    sent_.clear();
    stage_ = stage;
    for (std::size_t e = 0; e < edges_.size(); ++e) {
      if (edges_[e].to == stage) stash(keys_[e], arriving_[e]);
    }
  }
  void stash(const SkipKey& key, Tensor tensor) override {
    sent_[key] = tensor;
    tensors_[key] = std::move(tensor);
  }
  Tensor pop(const SkipKey& key) override { return std::move(tensors_.extract(key).mapped()); }
  Tensor peek(const SkipKey& key) override { return tensors_.at(key); }

 private:
  const std::vector<Edge>& edges_;
  const std::vector<SkipKey>& keys_;
  int stage_ = 0;
  std::map<std::size_t, Tensor> arriving_;  // by edge
  // Of the stage: what it has made or got, and what its layers have yet to pop.
  std::map<SkipKey, Tensor> sent_;
  std::map<SkipKey, Tensor> tensors_;
};

/// Joins the parts of the micro-batches tensor by tensor.
template <class Join>
std::vector<Tensor> join_each(const std::vector<std::vector<Tensor>>& parts, Join join) {
  std::vector<Tensor> joined;
  for (std::size_t k = 0; k < parts.front().size(); ++k) {
    std::vector<Tensor> of_tensor;
    for (const auto& part : parts) of_tensor.push_back(part[k]);
    joined.push_back(join(std::move(of_tensor)));
  }
  return joined;
}

}  // namespace

std::vector<Tensor> reference(const Sequential& model, const Balance& balance, const ReferenceStep& step) {
  const auto layers = make_layers(*model);
  std::vector<NamedLayer> named;
  for (const auto& layer : layers) named.push_back({layer->name(), layer->module()});
  std::vector<int> stage_of;
  for (std::size_t s = 0; s < balance.size(); ++s) stage_of.insert(stage_of.end(), balance[s], static_cast<int>(s));
  const auto skips = skip_links(named);
  std::vector<LayerLink> links;
  for (const auto& skip : skips) links.push_back({skip.from, skip.readers, skip.key.name});
  std::vector<int> links_of_edges;
  auto edges = cut_edges(balance, links, step.placement, &links_of_edges);
  edges.erase(edges.begin(), edges.end() - std::ssize(links_of_edges));  // the activations'
  std::vector<SkipKey> keys;
  for (const int link : links_of_edges) keys.push_back(skips[link].key);

  const auto seed = RandomScope::draw_seed();
  const auto count = step.sizes.size();
  const auto inputs = scatter(step.input, step.sizes);
  const auto targets = step.loss ? scatter(step.target, step.sizes) : std::vector<Parcel>(count);
  std::vector<edge_list> entries(count);  // of the inputs
  std::vector<std::vector<Tensor>> outputs(count);
  std::vector<edge_list> roots(count);
  std::vector<variable_list> root_gradients(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto number = step.first_micro_batch + static_cast<std::int64_t>(i);
    CrossingContext context(edges, keys);
    SkipContextGuard guard(context);
    std::vector<Tensor> entered;
    for (std::size_t k = 0; k < inputs[i].tensors.size(); ++k) {
      const auto& tensor = inputs[i].tensors[k];
      entered.push_back(inputs[i].wants_gradient[k] ? enter(tensor) : tensor.detach());
      entries[i].emplace_back(entered.back().grad_fn(), 0);
    }
    Value value(step.input.form(), std::move(entered));
    for (std::size_t l = 0; l < layers.size(); ++l) {
      if (l > 0 && stage_of[l] != stage_of[l - 1]) {
        auto tensors = value.tensors();
        for (auto& tensor : tensors) tensor = cross(tensor);
        value = Value(value.form(), std::move(tensors));
        context.enter_stage(stage_of[l]);
      }
      RandomScope scope(seed, static_cast<std::int64_t>(l), number);
      value = layers[l]->forward(std::move(value));
    }
    for (const auto& tensor : value.tensors()) outputs[i].push_back(tensor.detach());
    if (step.loss) {
      RandomScope scope(seed, static_cast<std::int64_t>(layers.size()), number);
      value = step.loss(value, Value(step.target.form(), targets[i].tensors));
      root_gradients[i].push_back(torch::ones_like(value.tensor()));
    }
    for (const auto& tensor : value.tensors()) roots[i].push_back(leave(tensor));
  }

  auto joined = join_each(outputs, [](const auto& parts) { return torch::cat(parts); });
  for (std::size_t k = 0; step.gradients_of && k < joined.size(); ++k) {
    joined[k].requires_grad_(std::ranges::any_of(roots, [&](const edge_list& part) { return part[k].is_valid(); }));
  }
  const auto gradients = step.gradients_of ? step.gradients_of(joined) : std::vector<Tensor>();
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    std::vector<std::int64_t> sizes;
    for (const auto& of_part : outputs) sizes.push_back(of_part[k].size(0));
    const auto parts = scatter_gradient(gradients[k], sizes);
    for (std::size_t i = 0; i < count; ++i) root_gradients[i].push_back(parts[i]);
  }

  const c10::impl::ExcludeDispatchKeyGuard outside_of_autocast(c10::autocast_dispatch_keyset);
  const auto parameters = distinct_parameters(*model);
  std::vector<Tensor> before;
  for (const auto& parameter : parameters) before.push_back(std::exchange(parameter.mutable_grad(), {}));
  auto sums = step.loss ? before : std::vector<Tensor>(parameters.size());
  const auto add_to = [](Tensor& sum, const Tensor& gradient) {
    if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient;
  };
  std::vector<std::vector<Tensor>> of_inputs(count);
  for (std::size_t turn = 0; turn < count; ++turn) {
    const auto i = step.ascending ? turn : count - 1 - turn;
    edge_list from;
    variable_list of_roots;
    for (std::size_t k = 0; k < roots[i].size(); ++k) {
      if (!roots[i][k].is_valid() || !root_gradients[i][k].defined()) continue;
      from.push_back(roots[i][k]);
      of_roots.push_back(root_gradients[i][k]);
    }
    edge_list to;
    for (const auto& entry : entries[i]) {
      if (entry.is_valid()) to.push_back(entry);
    }
    for (const auto& parameter : parameters) {
      if (parameter.requires_grad()) to.push_back(torch::autograd::impl::gradient_edge(parameter));
    }
    variable_list got(to.size());
    if (!from.empty()) {
      auto& engine = torch::autograd::Engine::get_default_engine();
      got = engine.execute(from, of_roots, /*keep_graph=*/false, /*create_graph=*/false,
                           /*accumulate_grad=*/to.empty(), to);
    }
    auto next = got.begin();
    for (const auto& entry : entries[i]) of_inputs[i].push_back(entry.is_valid() ? *next++ : Tensor());
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      if (!parameters[p].requires_grad()) continue;
      add_to(sums[p], std::exchange(parameters[p].mutable_grad(), {}));  // of a backward in a backward
      add_to(sums[p], *next++);
    }
  }
  for (std::size_t p = 0; !step.loss && p < parameters.size(); ++p) {
    add_to(before[p], sums[p]);
    sums[p] = before[p];
  }
  const auto give = [](const std::vector<Tensor>& leaves, const std::vector<Tensor>& of_leaves) {
    for (std::size_t k = 0; k < leaves.size(); ++k) {
      if (of_leaves[k].defined()) leaves[k].mutable_grad() = of_leaves[k];
    }
  };
  give(parameters, sums);
  give(step.input.tensors(), join_each(of_inputs, [&](auto parts) { return gather_gradient(parts, step.sizes); }));
  return joined;
}

}  // namespace gpipe
