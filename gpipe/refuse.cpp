#include "gpipe/refuse.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>

namespace gpipe {
namespace {

constexpr std::uint64_t kLevel = 0;  // PyTorch has no other

bool any_has_tangent(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const auto& tensor) { return tensor.defined() && tensor._fw_grad(kLevel).defined(); });
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

}  // namespace gpipe
