#include "gpipe/run/call.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <exception>

#include "absl/strings/str_cat.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

constexpr std::uint64_t kTangentLevel = 0;  // PyTorch has no other

bool any_has_tangent(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const auto& tensor) { return tensor.defined() && tensor._fw_grad(kTangentLevel).defined(); });
}

// Whether DistributedDataParallel averages a gradient. c10d's reducer, and nothing else, adds such hooks to accumulators.
bool has_reducer(const at::Tensor& parameter) {
  if (!parameter.requires_grad() || !parameter.is_leaf()) return false;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return accumulator &&
         std::any_of(accumulator->post_hooks().begin(), accumulator->post_hooks().end(), [](const auto& hook) {
           return dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
         });
}

}  // namespace

void Call::take_turn() {
  if (!turn_) turn_.emplace(pipeline_.call_mutex());
}

void Call::save(const std::vector<ParameterSinks>& sinks) {
  for (auto& stage : pipeline_.stages()) before_.push_back(stage.state.hold(stage, sinks[stage.index].own()));
  draw_.emplace();
}

Agreement Call::agree(Proposal proposal) {
  take_turn();
  has_answered_ = true;
  what_ = proposal.what;
  return pipeline_.team().agree(std::move(proposal));
}

void Call::report() noexcept try {
  auto& team = pipeline_.team();
  if (std::exchange(has_reported_, true) || team.size() == 1) return;
  const auto message = message_of(std::current_exception());
  if (has_started_) {
    team.fail(absl::StrCat("rank ", team.rank(), " failed in ", what_, ": ", message));
  } else if (!has_answered_) {
    take_turn();
    team.withdraw(message);
  }
} catch (...) {  // the error that is being handled says more
}

void Call::fail() noexcept {
  report();
  for (std::size_t s = 0; s < before_.size(); ++s) {
    auto& stage = pipeline_.stages()[s];
    stage.state.restore_after_error(stage, before_[s]);
  }
  if (draw_) draw_->undo();
}

void refuse_transforms(const Value& input, const std::vector<Stage>& stages) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::jit::tracer::isTracing(),
      "[gpipe] torch.jit.trace cannot trace a pipeline, because its workers run outside the trace; trace the "
      "unpartitioned model instead");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode),
      "[gpipe] a pipeline cannot run under a torch.func transform (jvp, vmap, grad, ...); use backward() or "
      "torch.autograd.grad, or transform the unpartitioned model");
  if (torch::autograd::ForwardADLevel::try_get_by_idx(kTangentLevel) == nullptr) return;
  bool found = any_has_tangent(input.tensors());
  for (const auto& stage : stages) {
    found = found || any_has_tangent(stage.parameters()) || any_has_tangent(stage.buffers());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!found,
                              "[gpipe] a pipeline has no forward-mode derivative, but an input, a parameter or a "
                              "buffer has a tangent; use backward(), or the unpartitioned model");
}

void refuse_step_in_ddp(const std::vector<Stage>& stages) {
  for (const auto& stage : stages) {
    const auto parameters = stage.parameters();
    if (std::none_of(parameters.begin(), parameters.end(), has_reducer)) continue;
    throw_error(
        "the pipeline is inside DistributedDataParallel, which would not average the gradients of step(); give the "
        "ranks replicas instead (Ranks with replicas=2, without DistributedDataParallel), or put a module around the "
        "pipeline whose forward returns pipe.loss(...)");
  }
}

}  // namespace gpipe
