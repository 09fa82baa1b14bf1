#include "balance/lone_layer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn/module.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "gpipe/autograd/boundary.h"

namespace gpipe {
namespace {

using torch::autograd::deleteNode;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// Registers the parameters and buffers of another module, under other names.
struct Shell : torch::nn::Module {
  explicit Shell(std::shared_ptr<torch::nn::Module> module) : inner(std::move(module)) {
    int i = 0;
    for (auto& parameter : inner->parameters()) {
      register_parameter("parameter" + std::to_string(i++), parameter, parameter.requires_grad());
    }
    for (auto& buffer : inner->buffers()) register_buffer("buffer" + std::to_string(i++), buffer);
  }
  void train(bool on) override {
    torch::nn::Module::train(on);
    inner->train(on);
  }

  const std::shared_ptr<torch::nn::Module> inner;
};

/// Sink node that discards incoming gradients.
struct Discard : Node {
  variable_list apply(variable_list&&) override { return {}; }
};

/// Passes gradients on to a layer's outputs, and ones to its stashed tensors.
struct AddOnes : Node {
  variable_list apply(variable_list&& gradients) override {
    for (const auto& [sizes, options] : stashed) gradients.push_back(at::ones(sizes, options));
    return std::move(gradients);
  }
  std::vector<std::pair<std::vector<std::int64_t>, at::TensorOptions>> stashed;
};

class LoneContext : public SkipContext {
 public:
  LoneContext(const Skips& entering, Skips* leaving) : entering_(entering), leaving_(leaving) {}

  void stash(const SkipKey& key, at::Tensor tensor) override {
    own_[key] = tensor;
    if (leaving_ != nullptr) (*leaving_)[key] = tensor.defined() ? tensor.detach() : tensor;
    if (tensor.defined() && tensor.requires_grad()) stashed.push_back(std::move(tensor));
  }
  at::Tensor pop(const SkipKey& key) override {
    if (const auto own = own_.extract(key)) return own.mapped();
    const auto found = entering_.find(key);
    if (found == entering_.end())
      throw std::runtime_error("[profile] skip " + to_string(key) + " is popped but no earlier layer stashed it");
    if (!found->second.defined()) return {};
    auto tensor = found->second.clone();
    if (at::GradMode::is_enabled() && (tensor.is_floating_point() || tensor.is_complex())) {
      torch::autograd::set_history(tensor, std::shared_ptr<Node>(new Discard(), deleteNode));
    }
    return tensor;
  }

  std::vector<at::Tensor> stashed;

 private:
  const Skips& entering_;
  Skips* const leaving_;
  Skips own_;
};

}  // namespace

LoneLayer::LoneLayer(std::unique_ptr<Layer> layer, const Skips& entering, Skips* leaving)
    : LayerDecorator(std::move(layer)),
      entering_(entering),
      leaving_(leaving),
      shell_(std::make_shared<Shell>(this->layer().module())) {}

Value LoneLayer::forward(Value input) {
  LoneContext context(entering_, leaving_);
  const SkipContextGuard guard(context);
  auto output = layer().forward(std::move(input));
  if (context.stashed.empty()) return output;
  const auto node = std::shared_ptr<AddOnes>(new AddOnes(), deleteNode);
  output = append_node(output, node);
  for (const auto& stashed : context.stashed) {
    node->add_next_edge(torch::autograd::impl::gradient_edge(stashed));
    node->stashed.emplace_back(stashed.sizes().vec(), stashed.options());
  }
  return output;
}

}  // namespace gpipe
