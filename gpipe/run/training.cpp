// The calls of a GPipe that train or evaluate, and their history in autograd.

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/autograd.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/gpipe.h"
#include "gpipe/run/mini_batch.h"
#include "gpipe/schedule/auto_schedule.h"
#include "gpipe/schedules.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

using Sizes = std::vector<std::int64_t>;

constexpr std::uint64_t kTangentLevel = 0;  // PyTorch has no other

bool any_has_tangent(const std::vector<at::Tensor>& tensors) {
  return std::ranges::any_of(
      tensors, [](const auto& tensor) { return tensor.defined() && tensor._fw_grad(kTangentLevel).defined(); });
}

// Whether DistributedDataParallel averages a gradient: only c10d's reducer adds such hooks to accumulators.
bool has_reducer(const at::Tensor& parameter) {
  if (!parameter.requires_grad() || !parameter.is_leaf()) return false;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return accumulator && std::ranges::any_of(accumulator->post_hooks(), [](const auto& hook) {
           return dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
         });
}

// Refuses a call under a transform of the calling thread that would not reach the workers.
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
    if (std::ranges::none_of(stage.parameters(), has_reducer)) continue;
    throw_error(
        "the pipeline is inside DistributedDataParallel, which would not average the gradients of step(); give the "
        "ranks replicas instead (Ranks with replicas=2, without DistributedDataParallel), or put a module around the "
        "pipeline whose forward returns pipe.compute_loss(...)");
  }
}

// Which devices' operations autocast casts, and to which types.
std::vector<std::int64_t> autocast_types() {
  std::vector<std::int64_t> types;
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (!at::autocast::is_autocast_enabled(type)) continue;
    for (const auto number : {static_cast<int>(type), static_cast<int>(at::autocast::get_autocast_dtype(type))}) {
      types.push_back(number);
    }
  }
  return types;
}

// Advances the version counter of each input that layers have changed, so that graphs which saved it refuse it:
// micro-batches share its memory, but have version counters of their own, which `parts` note.
void note_writes(const Value& input, const std::vector<std::vector<VersionWatch>>& parts) {
  for (std::size_t k = 0; k < input.tensors().size(); ++k) {
    const auto& tensor = input.tensors()[k];
    const bool is_changed = std::ranges::any_of(parts, [&](const auto& part) { return part[k].changed(); });
    if (is_changed && !tensor.is_inference()) torch::autograd::impl::bump_version(tensor);
  }
}

// Makes a mini-batch and starts it.
std::pair<std::shared_ptr<MiniBatch>, Results> start(Call& call, const std::shared_ptr<Pipeline>& pipeline,
                                                     const Value& input, MiniBatch::Options options,
                                                     StepLoss* loss = nullptr) {
  options.key.autocast = autocast_types();
  auto parts = scatter(input, options.key.sizes);
  std::vector<std::vector<VersionWatch>> versions;
  for (const auto& part : parts) versions.push_back(part.versions);
  const absl::Cleanup writes = [&] { note_writes(input, versions); };
  auto mini_batch = std::make_shared<MiniBatch>(pipeline, std::move(parts), std::move(options), loss);
  auto results = mini_batch->start(call);
  return {std::move(mini_batch), std::move(results)};
}

// The tensors to which a mini-batch has gradients: its inputs and the parameters with sinks. Over ranks, a last one
// makes every rank run its backward, also if none of its own parameters wants a gradient.
std::vector<at::Tensor> sources_of(const MiniBatch& mini_batch, const Pipeline& pipeline, const Value& input) {
  auto sources = input.tensors();
  for (int s = 0; s < pipeline.count(); ++s) {
    const auto& parameters = mini_batch.sinks(s).parameters();
    sources.insert(sources.end(), parameters.begin(), parameters.end());
  }
  if (pipeline.team().size() > 1) sources.push_back(at::zeros({}).requires_grad_());
  return sources;
}

// Sets the schedule of later steps. Rank 0 chooses it from the times of its replica in a step that all ranks have
// recorded. If that replica had no samples, the next step measures again.
void choose_schedule(Pipeline& pipeline, Timeline measured, const Sizes& sizes, const Checkpoints& checkpoints) {
  auto& team = pipeline.team();
  if (team.size() > 1) {
    const auto all = team.gather(to_bytes(measured.spans));
    for (int r = 1; r < std::ssize(all); ++r) {
      if (team.replica_of(r) != 0) continue;
      const auto spans = to_items<Span>(all[r]);
      measured.spans.insert(measured.spans.end(), spans.begin(), spans.end());
    }
  }
  std::string schedule;
  if (team.rank() == 0 && sizes.front() > 0) {
    const auto& devices = pipeline.devices();
    const bool saves_memory = !std::ranges::all_of(devices, &c10::Device::is_cpu);
    const Layout layout{pipeline.count(), static_cast<int>(sizes.size()), pipeline.placement()};
    schedule =
        fastest_schedule(measured, layout, checkpoints, /*last_is_smaller=*/sizes.back() < sizes.front(), saves_memory);
  }
  if (team.size() > 1) schedule = team.share(schedule);
  if (!schedule.empty()) pipeline.calls().set_schedule(schedule);
}

std::vector<torch::Device> devices_of(const Value& value) {
  std::vector<torch::Device> devices;
  for (const auto& tensor : value.tensors()) devices.push_back(tensor.device());
  return devices;
}

// Gives a gradient the strides with which an accumulator takes it as it is. PyTorch would copy it, and may run out of
// memory when other parameters have their gradients already.
at::Tensor fit(at::Tensor gradient, const at::Tensor& parameter) {
  using namespace torch::autograd::utils;
  const bool is_plain = gradient.defined() && has_plain_memory(gradient) && has_plain_memory(parameter);
  if (!is_plain || obeys_layout_contract(gradient, parameter)) return gradient;
  return clone_obey_contract(gradient, parameter);
}

// Returns the gradients of sources_of(), in order. `devices`: the input's.
std::vector<at::Tensor> gradients_of_sources(BackwardGradients::Result result, const Sizes& sizes,
                                             const std::vector<torch::Device>& devices, const MiniBatch& mini_batch,
                                             const Team& team) {
  std::vector<at::Tensor> all;
  for (std::size_t k = 0; k < devices.size(); ++k) {
    std::vector<at::Tensor> pieces;
    for (auto& part : result.inputs) pieces.push_back(part.empty() ? at::Tensor() : std::move(part[k]));
    auto gradient = gather_gradient(std::move(pieces), sizes);
    if (gradient.defined() && gradient.device() != devices[k]) gradient = gradient.to(devices[k]);
    all.push_back(unshared(std::move(gradient)));
  }
  for (std::size_t s = 0; s < result.parameters.size(); ++s) {
    const auto& parameters = mini_batch.sinks(static_cast<int>(s)).parameters();
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      all.push_back(fit(std::move(result.parameters[s][p]), parameters[p]));
    }
  }
  if (team.size() > 1) all.emplace_back();
  return all;
}

// Attaches outputs to the sources.
void attach(const std::vector<at::Tensor>& outputs, const std::vector<bool>& wanted, const Pipeline& pipeline,
            const Value& input, const std::vector<at::Tensor>& sources, BackwardFunction backward) {
  auto devices = devices_of(input);
  devices.insert(devices.end(), pipeline.devices().begin(), pipeline.devices().end());
  attach_backward(outputs, wanted, sources, std::move(devices), std::move(backward));
}

// The backward of forward().
BackwardFunction backward_of(std::shared_ptr<MiniBatch> mini_batch, std::shared_ptr<Pipeline> pipeline,
                             const Value& input, const Sizes& sizes) {
  const auto& tensors = input.tensors();
  return [mini_batch = std::move(mini_batch), pipeline = std::move(pipeline), devices = devices_of(input), sizes,
          entered = std::vector<VersionWatch>(tensors.begin(), tensors.end())](std::vector<at::Tensor> gradients,
                                                                               bool retain_graph) {
    auto all = in_call(*pipeline, [&](Call& call) {
      pipeline->calls().set_error(std::nullopt);
      // Micro-batches have version counters of their own.
      if (std::ranges::any_of(entered, &VersionWatch::changed)) {
        throw_error("an input was changed in place between the forward and its backward; change a clone instead");
      }
      std::vector<Gradients> of_parts(sizes.size());
      const bool has_outputs = pipeline->is_here(pipeline->count() - 1);
      for (const auto& gradient : gradients) {
        auto pieces = scatter_gradient(has_outputs ? gradient : at::Tensor(), sizes);
        for (std::size_t i = 0; i < of_parts.size(); ++i) of_parts[i].push_back(std::move(pieces[i]));
      }
      auto result = mini_batch->backward(call, std::move(of_parts), retain_graph);
      return gradients_of_sources(std::move(result), sizes, devices, *mini_batch, pipeline->team());
    });
    pipeline->team().watch_backward(pipeline);
    return all;
  };
}

// The backward of a step's loss: hands out the gradients, times the incoming one unless that is `unit`.
BackwardFunction hand_out(std::vector<at::Tensor> gradients, std::shared_ptr<Pipeline> pipeline,
                          std::shared_ptr<const at::Tensor> unit) {
  return [gradients = std::move(gradients), pipeline = std::move(pipeline), unit = std::move(unit)](
             std::vector<at::Tensor> incoming, bool retain_graph) mutable {
    pipeline->team().watch_backward(pipeline);
    auto handed = retain_graph ? gradients : std::move(gradients);
    // step() itself asks for the gradients as they are.
    if (unit && incoming.front().is_same(*unit)) return handed;
    for (auto& gradient : handed) {
      if (!gradient.defined()) continue;
      gradient = incoming.front().defined() ? gradient * incoming.front().to(gradient.device()) : at::Tensor();
    }
    return handed;
  };
}

}  // namespace

std::string GPipeImpl::schedule() const {
  auto chosen = pipeline_->calls().chosen_schedule();
  return chosen.empty() ? options_.schedule() : chosen;
}

torch::Tensor GPipeImpl::forward(torch::Tensor input) { return forward(Value(std::move(input))).tensor(); }

std::vector<torch::Tensor> GPipeImpl::forward(std::vector<torch::Tensor> input) & {
  return forward(Value(std::move(input))).tensors();
}

Value GPipeImpl::forward(Value input) & {
  const bool is_default = !options_.schedule_function() && fills_and_drains(schedule());
  if (!is_default && is_training() && at::GradMode::is_enabled()) {
    std::call_once(warned_, [&] {
      TORCH_WARN("[gpipe] forward() and its backward always fill and drain; only step() has the schedule '",
                 options_.schedule_function() ? "schedule_function" : schedule(), "'");
    });
  }
  return run(std::move(input), options_.chunks(), options_.split_size(),
             is_training() ? options_.checkpoint() : Checkpoints(Checkpoint::kNever));
}

Value GPipeImpl::forward(Value input, std::int64_t chunks, const Checkpoints& checkpoints) & {
  return run(std::move(input), chunks, /*split_size=*/0, checkpoints);
}

std::int64_t GPipeImpl::least_samples() const { return has_batch_norm_ && is_training() ? 2 : 1; }

Value GPipeImpl::run(Value input, std::int64_t chunks, std::int64_t split_size, const Checkpoints& checkpoints) {
  return in_call(*pipeline_, [&](Call& call) {
    const bool grad = at::GradMode::is_enabled();
    pipeline_->calls().set_error(std::nullopt);
    const auto sizes = micro_batch_sizes(batch_size(input), chunks, split_size, least_samples());
    refuse_transforms(input, pipeline_->stages());
    StepKey key{.call = grad ? StepKey::kForwardWithGradients : StepKey::kForward,
                .training = is_training(),
                .checkpoints = checkpoints,
                .sizes = sizes};
    auto [mini_batch, results] = start(call, pipeline_, input, {std::move(key), options_.deferred_batch_norm()});
    auto& output = results.outputs;
    const auto& wanted = output.wants_gradient;
    if (grad && std::ranges::find(wanted, true) != wanted.end()) {
      const auto sources = sources_of(*mini_batch, *pipeline_, input);
      attach(output.value.tensors(), wanted, *pipeline_, input, sources,
             backward_of(std::move(mini_batch), pipeline_, input, sizes));
    }
    return std::move(output.value);
  });
}

StepResult GPipeImpl::step(Value input, Value target, const LossFunction& loss, const StepOptions& options) {
  const ExitGuard guard;
  const Turn turn(*pipeline_);  // until the gradients are in `.grad`, which the next step adds to
  const auto unit = std::make_shared<at::Tensor>();
  auto result = run_step(std::move(input), std::move(target), loss, options, unit);
  if (result.loss.requires_grad()) torch::autograd::backward({result.loss}, {*unit});
  result.loss = result.loss.detach();
  return result;
}

torch::Tensor GPipeImpl::compute_loss(Value input, Value target, const LossFunction& loss, const StepOptions& options) {
  return run_step(std::move(input), std::move(target), loss, options, nullptr).loss;
}

StepResult GPipeImpl::run_step(Value input, Value target, const LossFunction& loss, const StepOptions& options,
                               std::shared_ptr<at::Tensor> unit) {
  return in_call(*pipeline_, [&](Call& call) {
    pipeline_->calls().set_error(std::nullopt);
    if (!is_training() || !at::GradMode::is_enabled()) {
      throw_error(
          "step() trains, so it needs training mode and grad mode; call it after train() and outside no_grad, or "
          "call forward(), or evaluate() in Python");
    }
    refuse_transforms(input, pipeline_->stages());
    if (unit) refuse_step_in_ddp(pipeline_->stages());
    const auto samples = batch_size(input);
    const bool has_own = options.chunks() != 0;
    const auto sizes = micro_batch_sizes(samples, has_own ? options.chunks() : options_.chunks(),
                                         has_own ? 0 : options_.split_size(), least_samples());
    const auto completed = complete(options, loss, target, samples);
    const auto checkpoints = options.checkpoint().value_or(options_.checkpoint());
    const bool measures = schedule() == kAnySchedule;
    StepLoss step_loss(*pipeline_, loss, completed, scatter(target, sizes), sizes);
    StepKey key{.call = StepKey::kStep,
                .measures = measures,
                .returns_output = completed.return_output(),
                .sums_losses = completed.reduction() == Reduction::kSum,
                .counts = completed.count() != nullptr,
                .scale = completed.scale(),
                .checkpoints = checkpoints,
                .sizes = sizes};
    auto [mini_batch, results] =
        start(call, pipeline_, input, {std::move(key), options_.deferred_batch_norm(), unit != nullptr}, &step_loss);
    if (measures) choose_schedule(*pipeline_, mini_batch->timeline(), sizes, checkpoints);
    auto gradients =
        gradients_of_sources(std::move(results.gradients), sizes, devices_of(input), *mini_batch, pipeline_->team());
    const auto sources = sources_of(*mini_batch, *pipeline_, input);
    if (std::ranges::any_of(sources, &at::Tensor::requires_grad)) {
      if (unit) *unit = at::ones_like(results.loss);
      attach({results.loss}, {true}, *pipeline_, input, sources,
             hand_out(std::move(gradients), pipeline_, std::move(unit)));
    }
    return StepResult{std::move(results.loss), std::move(results.outputs.value)};
  });
}

}  // namespace gpipe
