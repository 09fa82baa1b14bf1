#include "gpipe/gpipe.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/assembly/inventory.h"
#include "gpipe/assembly/stages.h"
#include "gpipe/assembly/workers.h"
#include "gpipe/base/checks.h"
#include "gpipe/ranks.h"
#include "gpipe/ranks/job.h"
#include "gpipe/ranks/rank_team.h"
#include "gpipe/run/history.h"
#include "gpipe/run/micro_batch.h"
#include "gpipe/run/mini_batch.h"
#include "gpipe/run/refuse.h"
#include "gpipe/run/replica_state.h"
#include "gpipe/schedules.h"
#include "gpipe/tensors/sample_hash.h"

namespace gpipe {
namespace {

// Returns the names of tensors in the state. `first_names` has those that are known, by the tensor's identity.
std::vector<GPipeImpl::StateName> state_names(const std::vector<TensorPlace>& places,
                                              absl::flat_hash_map<const void*, std::string>& first_names) {
  std::vector<GPipeImpl::StateName> names;
  for (const auto& place : places) {
    const auto name = registered_name(place.layer) + "." + place.key;
    const auto first = first_names.try_emplace(place.tensor._unsafe_get_target(), name).first->second;
    names.push_back({name, place.stage, first});
  }
  return names;
}

void check_options(const GPipeOptions& options) {
  check_chunks(options.chunks());
  if (options.split_size() < 0) {
    refuse_argument("split_size must be positive, or 0 for none, but is " + std::to_string(options.split_size()));
  }
  if (options.split_size() > 0 && options.chunks() != 1) {
    refuse_argument("chunks (" + std::to_string(options.chunks()) + ") and split_size (" +
                    std::to_string(options.split_size()) + ") exclude each other; set only one of them");
  }
  if (options.intraop_threads() < 0) {
    refuse_argument("intraop_threads must be positive, or 0 for an equal share, but is " +
                    std::to_string(options.intraop_threads()));
  }
}

int share_of_threads(const Workers& workers) {
  int on_cpu = 0;
  for (std::size_t w = 0; w < workers.devices.size(); ++w) on_cpu += workers.is_here(w) && workers.devices[w].is_cpu();
  return std::max(1, at::get_num_threads() / std::max(1, on_cpu));
}

// Which devices' operations autocast casts, and to which type.
std::string describe_autocast() {
  std::string text;
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (!at::autocast::is_autocast_enabled(type)) continue;
    absl::StrAppend(&text, ", autocast of ", c10::DeviceTypeName(type, /*lower_case=*/true), " to ",
                    c10::toString(at::autocast::get_autocast_dtype(type)));
  }
  return text;
}

// Describes a call to the other ranks, which must make the same. The sizes are those of one replica.
void describe_call(MiniBatch::Options& options, const std::string& what, const std::vector<std::int64_t>& sizes) {
  const auto how = std::string(", checkpoint ") + to_string(options.checkpoint) +
                   (options.training ? "" : ", evaluation mode") + describe_autocast();
  options.proposal.what = what + " of micro-batches [" + absl::StrJoin(sizes, ", ") + "]" + how;
  options.proposal.same_on_all = what + how;
  options.sizes = sizes;
}

// By which the ranks notice that one of them has left out a mini-batch.
std::uint64_t hash_for_ranks(const Pipeline& pipeline, const Value& input) {
  return pipeline.team().size() == 1 ? 0 : sample_hash(input.tensors());
}

std::string describe_step(const StepOptions& options) {
  auto text = absl::StrCat("step", options.return_output() ? " with output" : "");
  if (options.scale() != 1) absl::StrAppendFormat(&text, " scaled by %.17g", options.scale());
  if (options.reduction() == Reduction::kSum) absl::StrAppend(&text, " with a sum of losses");
  if (options.count()) absl::StrAppend(&text, " with counts");
  return text;
}

}  // namespace

GPipeImpl::GPipeImpl(LayerFactories factories, std::vector<std::int64_t> balance, GPipeOptions options,
                     LanguageBinding binding)
    : balance_(std::move(balance)), options_(std::move(options)) {
  check_balance(balance_, factories.size());
  check_options(options_);
  auto workers = arrange_workers(options_, balance_.size());
  devices_ = workers.devices;
  std::vector<torch::Device> stage_devices;
  std::vector<bool> here;
  for (const int worker : workers.schedules.placement) {
    stage_devices.push_back(devices_[worker]);
    here.push_back(workers.is_here(worker));
  }
  auto stages = make_stages(balance_, stage_devices);
  for (std::size_t s = 0; s < binding.run_layers.size(); ++s) {
    auto& stage = stages.at(s);
    if (here[s]) stage.run_layers = std::move(binding.run_layers[s]);
  }
  const auto inventory = fill_stages(stages, balance_, std::move(factories), here, options_.ranks().get());
  const auto loans = find_loans(inventory.parameters());
  check_loans(loans, stages, here);
  forbid_writes_to_shared_buffers(inventory.buffers(), stages);
  auto edges = connect_stages(stages, balance_, match_skips(inventory.skips()), loans, here);
  absl::flat_hash_map<const void*, std::string> first_names;
  parameter_names_ = state_names(inventory.parameters(), first_names);
  buffer_names_ = state_names(inventory.buffers(), first_names);
  std::unique_ptr<Team> team;
  if (options_.ranks()) {
    team =
        std::make_unique<RankTeam>(options_.ranks(), workers.ranks, static_cast<int>(stages.size()),
                                   manifest_of(balance_, edges, inventory, options_), binding.structures, binding.poll);
  } else {
    team = std::make_unique<Alone>(static_cast<int>(devices_.size()));
  }
  absl::Cleanup tell_counterparts = [&] {
    if (options_.ranks() && options_.ranks()->replicas() > 1) {
      options_.ranks()->job().board().report("rank " + std::to_string(options_.ranks()->rank()) +
                                             " failed when it made its pipeline");
    }
  };
  move_to_devices(stages);
  for (auto& stage : stages) {
    stage.lock = binding.lock;
    for (const auto& layer : stage.layers) register_module(registered_name(layer->name()), layer->module());
  }
  absl::flat_hash_set<const void*> across;  // parameters that this rank and another one have
  for (const auto& [name, owner, borrower, lent, borrowed] : loans) {
    if (here[owner] == here[borrower]) continue;
    const auto parameter = here[owner] ? stages[owner].parameters()[lent] : stages[borrower].parameters()[borrowed];
    across.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& parameter : named_parameters()) {
    if (across.contains(parameter->unsafeGetTensorImpl())) across_ranks_.emplace_back(parameter.pair());
  }
  const int threads = options_.intraop_threads() > 0 ? options_.intraop_threads() : share_of_threads(workers);
  pipeline_ = std::make_shared<Pipeline>(std::move(stages), std::move(edges), std::move(workers.schedules), threads,
                                         std::move(binding), std::move(team));
  const auto is_on_cpu = [&](const Stage& stage) { return here[stage.index] && stage.device.is_cpu(); };
  if (options_.keep_memory() && std::any_of(pipeline_->stages().begin(), pipeline_->stages().end(), is_on_cpu)) {
    pipeline_->keep_memory();
  }
  if (pipeline_->team().replicas() > 1) take_state_of_first_replica(*pipeline_);
  std::move(tell_counterparts).Cancel();
}

GPipeImpl::GPipeImpl(LayerFactories model, std::vector<std::int64_t> balance, GPipeOptions options)
    : GPipeImpl(independent(std::move(model)), std::move(balance), std::move(options), LanguageBinding()) {}

GPipeImpl::GPipeImpl(std::vector<std::unique_ptr<Layer>> layers, std::vector<std::int64_t> balance,
                     GPipeOptions options, const LanguageBinding& binding)
    : GPipeImpl(factories_of(std::move(layers)), std::move(balance), std::move(options), binding) {}

GPipeImpl::GPipeImpl(const torch::nn::Sequential& model, std::vector<std::int64_t> balance, GPipeOptions options)
    : GPipeImpl(make_layers(*model), std::move(balance), std::move(options), LanguageBinding()) {}

GPipeImpl::GPipeImpl(const NestedSequential& model, std::vector<std::int64_t> balance, GPipeOptions options)
    : GPipeImpl(make_layers(*model), std::move(balance), std::move(options), LanguageBinding()) {}

torch::Tensor GPipeImpl::forward(torch::Tensor input) { return forward(Value(std::move(input))).tensor(); }

std::vector<torch::Tensor> GPipeImpl::forward(std::vector<torch::Tensor> input) {
  return forward(Value(std::move(input))).tensors();
}

Value GPipeImpl::forward(Value input) {
  const bool is_default = !options_.schedule_function() && fills_and_drains(options_.schedule());
  if (!is_default && is_training() && at::GradMode::is_enabled()) {
    std::call_once(warned_, [&] {
      TORCH_WARN("[gpipe] forward() and its backward always fill and drain; only step() has the schedule '",
                 options_.schedule_function() ? "schedule_function" : options_.schedule(), "'");
    });
  }
  return run(std::move(input), options_.chunks(), options_.split_size(),
             is_training() ? options_.checkpoint() : Checkpoint::kNever);
}

Value GPipeImpl::forward(Value input, std::int64_t chunks, Checkpoint checkpoint) {
  return run(std::move(input), chunks, /*split_size=*/0, checkpoint);
}

Value GPipeImpl::run(Value input, std::int64_t chunks, std::int64_t split_size, Checkpoint checkpoint) {
  const bool grad = at::GradMode::is_enabled();
  const auto use = grad ? Pipeline::Use::kForwardAndBackward : Pipeline::Use::kForward;
  std::vector<std::int64_t> sizes;
  std::shared_ptr<MiniBatch> mini_batch;
  auto output = in_call(*pipeline_, [&](Call& call) {
    pipeline_->set_error(std::nullopt);
    if (split_size == 0) check_chunks(chunks);
    sizes = micro_batch_sizes(batch_size(input), chunks, split_size);
    refuse_transforms(input, pipeline_->stages());
    MiniBatch::Options options{use, checkpoint, options_.deferred_batch_norm(), is_training()};
    describe_call(options, grad ? "forward with gradients" : "forward", sizes);
    if (grad && is_training()) options.proposal.data = hash_for_ranks(*pipeline_, input);
    auto parts = scatter(input, sizes);
    const InputWrites writes(input, parts);
    auto made = std::make_shared<MiniBatch>(pipeline_, std::move(parts), std::move(options));
    auto result = made->forward(call);
    mini_batch = std::move(made);
    return result;
  });
  if (grad) attach_forward(std::move(mini_batch), pipeline_, input, sizes, output);
  return std::move(output.value);
}

StepResult GPipeImpl::step(Value input, Value target, const LossFunction& loss, const StepOptions& options) {
  const auto unit = std::make_shared<at::Tensor>();
  auto result = run_step(std::move(input), std::move(target), loss, options, unit);
  if (result.loss.requires_grad()) {
    *unit = at::ones_like(result.loss);
    torch::autograd::backward({result.loss}, {*unit});
  }
  result.loss = result.loss.detach();
  return result;
}

torch::Tensor GPipeImpl::loss(Value input, Value target, const LossFunction& loss, const StepOptions& options) {
  return run_step(std::move(input), std::move(target), loss, options, nullptr).loss;
}

StepResult GPipeImpl::run_step(Value input, Value target, const LossFunction& loss, const StepOptions& options,
                               std::shared_ptr<const at::Tensor> unit) {
  std::vector<std::int64_t> sizes;
  std::vector<at::Tensor> sources;
  auto outcome = in_call(*pipeline_, [&](Call& call) {
    pipeline_->set_error(std::nullopt);
    if (!is_training() || !at::GradMode::is_enabled()) {
      throw std::runtime_error(
          "[gpipe] step() trains, so it needs training mode and grad mode; use forward() to evaluate");
    }
    refuse_transforms(input, pipeline_->stages());
    if (unit) refuse_step_in_ddp(pipeline_->stages());
    const auto samples = batch_size(input);
    if (options.chunks() != 0) check_chunks(options.chunks());
    sizes = options.chunks() == 0 ? micro_batch_sizes(samples, options_.chunks(), options_.split_size())
                                  : micro_batch_sizes(samples, options.chunks(), /*split_size=*/0);
    check_loss_arguments(loss, target, samples, options);
    const auto completed = complete(options, loss);
    auto parts = scatter(input, sizes);
    auto targets = scatter(target, sizes);
    const InputWrites writes(input, parts);
    const bool has_loss = pipeline_->is_here(pipeline_->count() - 1);  // else the targets do not count
    auto weights = has_loss ? loss_weights(completed, sizes, targets) : std::vector<double>(sizes.size());
    LossInputs of_mini_batch{loss,
                             std::move(targets),
                             std::move(weights),
                             *completed.reduction(),
                             completed.scale(),
                             completed.return_output(),
                             completed.check() && has_loss};
    MiniBatch::Options made{Pipeline::Use::kStep, options.checkpoint().value_or(options_.checkpoint()),
                            options_.deferred_batch_norm()};
    describe_call(made, describe_step(completed), sizes);
    made.proposal.data = hash_for_ranks(*pipeline_, input);
    MiniBatch mini_batch(pipeline_, std::move(parts), std::move(made), std::move(of_mini_batch));
    auto result = mini_batch.step(call);
    sources = sources_of(mini_batch, *pipeline_, input);
    return result;
  });
  attach_step(outcome, pipeline_, input, sources, sizes, std::move(unit));
  return {std::move(outcome.loss), std::move(outcome.output.value)};
}

const std::vector<int>& GPipeImpl::placement() const { return pipeline_->placement(); }

bool GPipeImpl::is_here(int stage) const { return pipeline_->is_here(stage); }

std::vector<torch::Tensor> GPipeImpl::parameters() const {
  std::vector<torch::Tensor> trained;
  for (const auto& stage : pipeline_->stages()) {
    const auto parameters = stage.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!stage.borrows(i)) trained.push_back(parameters[i]);
    }
  }
  return trained;
}

bool GPipeImpl::ties_unchanged() const {
  std::vector<std::pair<std::string, torch::Tensor>> across;
  for (const auto& parameter : named_parameters()) {
    const auto is_it = [&](const auto& known) { return known.second.is_same(*parameter); };
    if (std::any_of(across_ranks_.begin(), across_ranks_.end(), is_it)) across.push_back(parameter.pair());
  }
  const auto is_same = [](const auto& a, const auto& b) { return a.first == b.first && a.second.is_same(b.second); };
  return find_loans(places_of_parameters(pipeline_->stages())) == pipeline_->loans() &&
         std::equal(across.begin(), across.end(), across_ranks_.begin(), across_ranks_.end(), is_same);
}

std::optional<ErrorInfo> GPipeImpl::last_error() const { return pipeline_->error(); }

void GPipeImpl::trace(std::shared_ptr<Timeline> timeline) { pipeline_->set_timeline(std::move(timeline)); }

std::shared_ptr<const Program> GPipeImpl::program(int micro_batches) const {
  if (micro_batches <= 0) refuse_argument("micro_batches must be positive, but is " + std::to_string(micro_batches));
  return pipeline_->program(micro_batches, options_.checkpoint(), Pipeline::Use::kStep);
}

void GPipeImpl::load(torch::serialize::InputArchive& archive) {
  torch::nn::Module::load(archive);
  move_to_devices(pipeline_->stages());
}

void GPipeImpl::to(torch::Device device, torch::Dtype, bool non_blocking) { to(device, non_blocking); }

void GPipeImpl::to(torch::Device device, bool) {
  TORCH_CHECK_TYPE(false, "[gpipe] cannot move to ", device,
                   ": a pipeline's parameters are placed on its devices; pass GPipeOptions().devices(...) instead");
}

}  // namespace gpipe
