#include "gpipe/autograd/pipeline_node.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

using torch::autograd::variable_list;

class PipelineNode : public torch::autograd::Node {
 public:
  explicit PipelineNode(BackwardFunction function) : function_(std::move(function)) {}

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                                "[gpipe] a pipeline cannot be differentiated twice; call backward or grad without "
                                "create_graph");
    std::lock_guard<std::mutex> lock(mutex_);  // of Node: several threads may run one graph
    TORCH_CHECK(function_,
                "[gpipe] trying to backward through a pipeline a second time, after its first backward freed the "
                "activations or failed; pass retain_graph to the first backward, or run the forward again");
    const bool retain_graph = torch::autograd::get_current_graph_task_keep_graph();
    // A failed backward cannot be repeated, because it has used up part of its cells.
    auto function = std::exchange(function_, nullptr);
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
    throw std::runtime_error("[gpipe] a layer threw an object that is not a std::exception");
  }

  BackwardFunction function_;
};

// Wraps a leaf's hook and calls it only if the leaf gets a gradient. The pipeline's node has an edge to every parameter,
// so the engine also reaches parameters that the outputs do not depend on.
class HookOfGradients : public torch::autograd::FunctionPreHook {
 public:
  explicit HookOfGradients(std::unique_ptr<FunctionPreHook> hook) : hook_(std::move(hook)) {}

  variable_list operator()(const variable_list& gradients) override {
    return gradients.front().defined() ? (*hook_)(gradients) : gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& arguments) const override {
    hook_->compiled_args(arguments);
  }

 private:
  const std::unique_ptr<FunctionPreHook> hook_;
};

void wrap_hooks(const at::Tensor& leaf) {
  for (auto& hook : torch::autograd::impl::hooks(leaf)) {
    if (dynamic_cast<HookOfGradients*>(hook.get()) == nullptr)
      hook = std::make_unique<HookOfGradients>(std::move(hook));
  }
}

}  // namespace

void attach_backward(const std::vector<at::Tensor>& outputs, const std::vector<bool>& differentiable,
                     const std::vector<at::Tensor>& inputs, BackwardFunction function) {
  auto node = std::shared_ptr<PipelineNode>(new PipelineNode(std::move(function)), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
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
