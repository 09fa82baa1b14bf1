#include "tests/gpipe/reference.h"

#include <torch/csrc/autograd/engine.h>

#include <map>
#include <utility>

#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/run/micro_batch.h"
#include "skip/context.h"
#include "skip/layout.h"

namespace gpipe {
namespace {

/// Does to the graph what a boundary does: adds an identity node and returns a tensor that is neither leaf nor view.
torch::Tensor cross(const torch::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto crossed = tensor.detach();
  if (tensor.requires_grad()) torch::autograd::impl::set_gradient_edge(crossed, leave(tensor));
  return crossed;
}

/// Passes skips on. One that goes to another stage crosses a boundary when it is stashed.
class CrossingContext : public SkipContext {
 public:
  CrossingContext(std::map<SkipKey, bool> crosses) : crosses_(std::move(crosses)) {}
  void stash(const SkipKey& key, at::Tensor tensor) override {
    tensors_[key] = crosses_.at(key) ? cross(tensor) : tensor;
  }
  at::Tensor pop(const SkipKey& key) override { return std::move(tensors_.extract(key).mapped()); }

 private:
  std::map<SkipKey, bool> crosses_;
  std::map<SkipKey, at::Tensor> tensors_;
};

}  // namespace

ReferenceResult reference(const torch::nn::Sequential& model, const std::vector<std::int64_t>& balance,
                          const Value& input, const std::vector<std::int64_t>& sizes,
                          const std::vector<torch::Tensor>& output_gradients, Order order) {
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<NamedLayer> named;
  auto children = model->named_children();
  auto child = children.begin();
  for (auto& any : *model) {
    layers.push_back(make_layer(child->key(), any));
    named.push_back({child->key(), any.ptr()});
    ++child;
  }
  std::vector<int> stage_of;
  for (std::size_t s = 0; s < balance.size(); ++s) stage_of.insert(stage_of.end(), balance[s], static_cast<int>(s));
  std::map<SkipKey, bool> crosses;
  for (const auto& link : skip_links(named)) crosses[link.key] = stage_of[link.from] != stage_of[link.to];

  const auto seed = RandomScope::draw_seed();
  const auto parameters = model->parameters();
  const auto inputs = scatter(input, sizes);
  std::vector<std::vector<torch::Tensor>> entered;
  std::vector<Value> outputs;
  std::vector<std::vector<torch::autograd::Edge>> roots;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    CrossingContext context(crosses);
    SkipContextGuard guard(context);
    auto& in = entered.emplace_back();
    for (std::size_t k = 0; k < inputs[i].tensors.size(); ++k) {
      in.push_back(inputs[i].wants_gradient[k] ? enter(inputs[i].tensors[k]) : inputs[i].tensors[k].detach());
    }
    Value value(input.form(), in);
    for (std::size_t l = 0; l < layers.size(); ++l) {
      if (l > 0 && stage_of[l] != stage_of[l - 1]) {
        auto tensors = value.tensors();
        for (auto& tensor : tensors) tensor = cross(tensor);
        value = Value(value.form(), std::move(tensors));
      }
      RandomScope scope(seed, static_cast<std::int64_t>(l), static_cast<std::int64_t>(i));
      value = layers[l]->forward(std::move(value));
    }
    auto& of_output = roots.emplace_back();
    for (const auto& tensor : value.tensors()) of_output.push_back(leave(tensor));
    outputs.push_back(std::move(value));
  }

  ReferenceResult result;
  result.parameter_gradients.resize(parameters.size());
  std::vector<std::vector<torch::Tensor>> input_parts(sizes.size());
  for (std::size_t turn = 0; turn < sizes.size(); ++turn) {
    const auto i = order == Order::kAscending ? turn : sizes.size() - 1 - turn;
    torch::autograd::edge_list from;
    torch::autograd::variable_list gradients;
    for (std::size_t k = 0; k < roots[i].size(); ++k) {
      std::vector<std::int64_t> output_sizes;
      for (const auto& output : outputs) output_sizes.push_back(output.tensors()[k].size(0));
      if (!roots[i][k].is_valid() || !output_gradients[k].defined()) continue;
      from.push_back(roots[i][k]);
      gradients.push_back(scatter_gradient(output_gradients[k], output_sizes)[i]);
    }
    torch::autograd::edge_list to;
    for (const auto& tensor : entered[i]) {
      if (tensor.grad_fn()) to.emplace_back(tensor.grad_fn(), 0);
    }
    for (const auto& parameter : parameters) {
      if (parameter.requires_grad()) to.push_back(torch::autograd::impl::gradient_edge(parameter));
    }
    torch::autograd::variable_list got(to.size());
    if (!from.empty() && !to.empty()) {
      got = torch::autograd::Engine::get_default_engine().execute(from, gradients, false, false, false, to);
    }
    std::size_t next = 0;
    for (const auto& tensor : entered[i]) input_parts[i].push_back(tensor.grad_fn() ? got[next++] : torch::Tensor());
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      if (!parameters[p].requires_grad()) continue;
      const auto& gradient = got[next++];
      auto& sum = result.parameter_gradients[p];
      if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient;
    }
  }
  for (std::size_t k = 0; k < input.tensors().size(); ++k) {
    std::vector<torch::Tensor> parts;
    for (const auto& part : input_parts) parts.push_back(part[k]);
    result.input_gradients.push_back(gather_gradient(parts, sizes));
  }
  for (std::size_t k = 0; k < outputs.front().tensors().size(); ++k) {
    std::vector<torch::Tensor> parts;
    for (const auto& output : outputs) parts.push_back(output.tensors()[k].detach());
    result.outputs.push_back(parts.size() == 1 ? parts.front() : torch::cat(parts));
  }
  return result;
}

}  // namespace gpipe
