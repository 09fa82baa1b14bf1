#include "gpipe/run/refuse.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <stdexcept>

namespace gpipe {
namespace {

constexpr std::uint64_t kLevel = 0;  // PyTorch has no other

bool any_has_tangent(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const auto& tensor) { return tensor.defined() && tensor._fw_grad(kLevel).defined(); });
}

// c10d's reducer, and nothing else, adds such hooks to the accumulators of gradients.
bool has_reducer(const at::Tensor& parameter) {
  if (!parameter.requires_grad() || !parameter.is_leaf()) return false;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return accumulator &&
         std::any_of(accumulator->post_hooks().begin(), accumulator->post_hooks().end(), [](const auto& hook) {
           return dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
         });
}

}  // namespace

void refuse_transforms(const Value& input, const std::vector<Stage>& stages) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::jit::tracer::isTracing(),
      "[gpipe] torch.jit.trace cannot trace a pipeline, because its workers run outside the trace; trace the "
      "unpartitioned model instead");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode),
      "[gpipe] a pipeline cannot run under a torch.func transform (jvp, vmap, grad, ...); use backward() or "
      "torch.autograd.grad, or transform the unpartitioned model");
  if (torch::autograd::ForwardADLevel::try_get_by_idx(kLevel) == nullptr) return;
  bool found = any_has_tangent(input.tensors());
  for (const auto& stage : stages)
    found = found || any_has_tangent(stage.parameters()) || any_has_tangent(stage.buffers());
  TORCH_CHECK_NOT_IMPLEMENTED(!found,
                              "[gpipe] a pipeline has no forward-mode derivative, but an input, a parameter or a "
                              "buffer has a tangent; use backward(), or the unpartitioned model");
}

void refuse_step_in_ddp(const std::vector<Stage>& stages) {
  for (const auto& stage : stages) {
    const auto parameters = stage.parameters();
    if (std::none_of(parameters.begin(), parameters.end(), has_reducer)) continue;
    throw std::runtime_error(
        "[gpipe] the pipeline is inside DistributedDataParallel, which would not average the gradients of step(); give "
        "the ranks replicas instead (Ranks with replicas=2, without DistributedDataParallel), or put a module around "
        "the pipeline whose forward returns pipe.loss(...)");
  }
}

}  // namespace gpipe
