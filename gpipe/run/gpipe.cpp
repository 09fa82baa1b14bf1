#include "gpipe/gpipe.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gpipe/assembly/stages.h"
#include "gpipe/base/checks.h"
#include "gpipe/ranks.h"
#include "gpipe/ranks/job.h"
#include "gpipe/ranks/team.h"
#include "gpipe/run/pipeline.h"

namespace gpipe {
namespace {

std::vector<GPipeImpl::StateName> state_names(const std::vector<TensorPlace>& places) {
  const auto name_of = [](const TensorPlace& place) { return registered_name(place.layer) + "." + place.key; };
  std::vector<GPipeImpl::StateName> names;
  for (const auto& place : places) names.push_back({name_of(place), place.stage, name_of(places[place.first])});
  return names;
}

void check_options(const GPipeOptions& options) {
  check_chunks(options.chunks());
  if (options.split_size() < 0) {
    refuse_argument("split_size must be positive, or 0 for none, but is ", options.split_size());
  }
  if (options.split_size() > 0 && options.chunks() != 1) {
    refuse_argument("chunks (", options.chunks(), ") and split_size (", options.split_size(),
                    ") exclude each other; set only one of them");
  }
  if (options.intraop_threads() < 0) {
    refuse_argument("intraop_threads must be positive, or 0 for an equal share, but is ", options.intraop_threads());
  }
}

std::string kind_of(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), "[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

// Module::load() takes a tensor of any shape, and the bytes of one of another type.
void check_kinds(const torch::nn::Module& module, torch::serialize::InputArchive& archive, const std::string& path) {
  const auto check = [&](const auto& tensors, bool are_buffers) {
    for (const auto& own : tensors) {
      at::Tensor saved;
      if (!own->defined() || !archive.try_read(own.key(), saved, are_buffers)) continue;
      if (kind_of(saved) == kind_of(*own)) continue;
      refuse_argument("the file is of another model: '", path, own.key(), "' is ", kind_of(saved), " in the file and ",
                      kind_of(*own), " in this model");
    }
  };
  check(module.named_parameters(/*recurse=*/false), false);
  check(module.named_buffers(/*recurse=*/false), true);
  for (const auto& child : module.named_children()) {
    torch::serialize::InputArchive inner;
    if (archive.try_read(child.key(), inner)) check_kinds(**child, inner, path + child.key() + ".");
  }
}

int share_of_threads(const Workers& workers) {
  int on_cpu = 0;
  for (std::size_t w = 0; w < workers.devices.size(); ++w) on_cpu += workers.is_here(w) && workers.devices[w].is_cpu();
  return std::max(1, at::get_num_threads() / std::max(1, on_cpu));
}

}  // namespace

GPipeImpl::GPipeImpl(LayerFactories factories, std::vector<std::int64_t> balance, GPipeOptions options,
                     LanguageBinding binding)
    : balance_(std::move(balance)), options_(std::move(options)) {
  check_balance(balance_, factories.size());
  check_options(options_);
  auto workers = arrange_workers(options_, balance_.size());
  devices_ = workers.devices;
  auto model = assemble(balance_, workers, std::move(factories), std::move(binding.run_layers), options_);
  auto& stages = model.stages;
  parameter_names_ = state_names(model.parameters);
  buffer_names_ = state_names(model.buffers);
  has_batch_norm_ = std::ranges::any_of(
      buffer_names_, [](const auto& buffer) { return buffer.name.ends_with(".num_batches_tracked"); });
  std::unique_ptr<Team> team;
  if (options_.ranks()) {
    team = std::make_unique<Team>(options_.ranks(), workers.ranks, workers.has_wires, model.manifest,
                                  binding.structures, binding.poll);
  } else {
    team = std::make_unique<Team>(static_cast<int>(devices_.size()));
  }
  absl::Cleanup tell_counterparts = [&] {
    if (options_.ranks() && options_.ranks()->replicas() > 1) {
      options_.ranks()->job().connections().fail(
          absl::StrCat("rank ", options_.ranks()->rank(), " failed when it made its pipeline"));
    }
  };
  move_to_devices(stages);
  for (auto& stage : stages) {
    stage.lock = binding.lock;
    for (const auto& layer : stage.layers) register_module(registered_name(layer->name()), layer->module());
  }
  absl::flat_hash_set<const void*> across;  // parameters that this rank and another one have
  for (const auto& [owner, borrower, name, borrowed] : model.loans) {
    if (model.here[owner] == model.here[borrower]) continue;
    const auto parameters =
        model.here[owner] ? stages[owner].parameters({name}) : stages[borrower].parameters({borrowed});
    across.insert(parameters.front().unsafeGetTensorImpl());
  }
  for (const auto& parameter : named_parameters()) {
    if (across.contains(parameter->unsafeGetTensorImpl())) across_ranks_.emplace_back(parameter.pair());
  }
  const int threads = options_.intraop_threads() > 0 ? options_.intraop_threads() : share_of_threads(workers);
  pipeline_ = std::make_shared<Pipeline>(std::move(stages), std::move(model.edges), std::move(workers.schedules),
                                         threads, std::move(binding), std::move(team));
  const auto is_on_cpu = [&](const Stage& stage) { return is_here(stage.index) && stage.device.is_cpu(); };
  if (options_.keep_memory() && std::ranges::any_of(pipeline_->stages(), is_on_cpu)) pipeline_->keep_memory();
  pipeline_->take_state_of_first_replica(/*all=*/true, /*trains=*/false);
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

const std::vector<int>& GPipeImpl::placement() const { return pipeline_->placement(); }

bool GPipeImpl::is_here(int stage) const { return pipeline_->is_here(stage); }

std::vector<torch::Tensor> GPipeImpl::parameters() const {
  std::vector<torch::Tensor> trained;
  for (const auto& stage : pipeline_->stages()) {
    const auto borrowed = stage.parameters(stage.borrowed);
    for (auto& parameter : stage.parameters()) {
      if (index_of(parameter, borrowed) == borrowed.size()) trained.push_back(std::move(parameter));
    }
  }
  return trained;
}

bool GPipeImpl::ties_unchanged() const {
  std::vector<std::pair<std::string, torch::Tensor>> across;
  for (const auto& parameter : named_parameters()) {
    const auto is_it = [&](const auto& known) { return known.second.is_same(*parameter); };
    if (std::ranges::any_of(across_ranks_, is_it)) across.push_back(parameter.pair());
  }
  const auto is_same = [](const auto& a, const auto& b) { return a.first == b.first && a.second.is_same(b.second); };
  return find_loans(places_of_parameters(pipeline_->stages())) == pipeline_->loans() &&
         std::ranges::equal(across, across_ranks_, is_same);
}

std::optional<ErrorInfo> GPipeImpl::last_error() const { return pipeline_->calls().error(); }

void GPipeImpl::trace(std::shared_ptr<Timeline> timeline) { pipeline_->calls().set_timeline(std::move(timeline)); }

std::shared_ptr<const Program> GPipeImpl::program(int micro_batches) const {
  if (micro_batches <= 0) refuse_argument("micro_batches must be positive, but is ", micro_batches);
  return pipeline_->calls().program(*pipeline_, micro_batches, options_.checkpoint(), StepKey::kStep);
}

void GPipeImpl::load(torch::serialize::InputArchive& archive) {
  check_kinds(*this, archive, "");
  torch::nn::Module::load(archive);
  move_to_devices(pipeline_->stages());
  pipeline_->calls().has_loaded = true;
}

void GPipeImpl::to(torch::Device device, torch::Dtype, bool non_blocking) { to(device, non_blocking); }

void GPipeImpl::to(torch::Device device, bool) {
  TORCH_CHECK_TYPE(false, "[gpipe] cannot move to ", device,
                   ": a pipeline's parameters are placed on its devices; pass GPipeOptions().devices(...) instead");
}

}  // namespace gpipe
