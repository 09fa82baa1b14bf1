#include "balance/profiler.h"

#include "balance/balance.h"
#include "balance/measurement.h"
#include "balance/memory_trace.h"
#include "balance/trial.h"
#include "gpipe/assembly/stages.h"
#include "gpipe/base/checks.h"
#include "gpipe/run/step_input.h"

namespace gpipe {

Model::Model(const torch::nn::Sequential& model) : Model([model] { return make_layers(*model); }) {}

Model::Model(const NestedSequential& model) : Model([model] { return make_layers(*model); }) {}

Model::Model(MakeLayers make) : make_(std::move(make)), module_(std::make_shared<torch::nn::Module>()) {
  for (const auto& layer : make_()) {
    module_->register_module(std::to_string(named_.size()), layer->module());
    named_.push_back({layer->name(), layer->module()});
  }
}

void find_sharing(Profile& profile, const std::vector<NamedLayer>& layers, bool can_lend) {
  TensorPlaces together;  // as if each layer were a stage
  TensorPlaces lent;
  for (int i = 0; i < static_cast<int>(layers.size()); ++i) {
    const auto& [name, module] = layers[i];
    together.add(i, name, module->named_buffers());
    (can_lend ? lent : together).add(i, name, module->named_parameters());
    profile.layers[i].shares_with = i;
  }
  for (const auto& place : together.all()) {
    auto& shares_with = profile.layers[place.stage].shares_with;
    shares_with = std::min(shares_with, together.all()[place.first].stage);
  }
  std::map<std::size_t, TieProfile> ties;  // by the first place
  for (const auto& place : lent.all()) {
    auto& tie = ties[place.first];
    if (tie.layers.empty()) tie = {place.name(), {}, bytes_of(at::Tensor(place.tensor.lock()))};
    if (tie.layers.empty() || tie.layers.back() != place.stage) tie.layers.push_back(place.stage);
  }
  for (auto& [first, tie] : ties) {
    if (tie.layers.size() > 1) profile.ties.push_back(std::move(tie));
  }
}

namespace {

constexpr double kMostParamScale = 1000;

void check(const Model& model, const Value& sample, const ProfileOptions& options) {
  if (model.named_layers().empty()) refuse_argument("the model has no layers");
  if (options.workers() < 1) refuse_argument("workers must be positive, but is ", options.workers());
  if (options.repeats() < 1) refuse_argument("repeats must be positive, but is ", options.repeats());
  if (options.intraop_threads() < 0) {
    refuse_argument("intraop_threads must not be negative (0 is an equal share), but is ", options.intraop_threads());
  }
  if (!(options.seconds() >= 0)) refuse_argument("seconds must not be negative, but is ", options.seconds());
  if (!(options.param_scale() >= 2 && options.param_scale() <= kMostParamScale)) {
    refuse_argument("param_scale must be from 2 (parameter and gradient) to ", kMostParamScale, ", but is ",
                    options.param_scale());
  }
  if (batch_size(sample) < 1) refuse_argument("the sample is empty; give one micro-batch");
}

}  // namespace

Profile profile(const Model& model, const Value& sample, const ProfileOptions& options, bool plain) {
  check(model, sample, options);
  const at::AutoGradMode grad_mode(true);
  auto rising = options;  // progress never falls back, even if the measurement starts again
  if (rising.intraop_threads() == 0) rising.intraop_threads(std::max(1, at::get_num_threads() / rising.workers()));
  double reported = 0;
  if (options.progress()) {
    rising.progress([&](double part) { options.progress()(reported = std::clamp(part, reported, 1.0)); });
  }
  const RestoreModule restore(model.module());
  auto measured = measure([&] { return restore.wrap(model.layers()); }, sample, rising, plain);
  restore.check();
  return measured;
}

Profile profile(const Model& model, const Value& sample, const ProfileOptions& options) {
  return profile(model, sample, options, /*plain=*/false);
}

std::vector<std::int64_t> balance_by_time(int partitions, const Model& model, const Value& sample,
                                          ProfileOptions options) {
  check_stages(partitions, static_cast<int>(model.named_layers().size()));
  const auto& tensors = sample.tensors();
  if (!tensors.empty() && tensors.front().defined() && tensors.front().is_cpu()) options.workers(partitions);
  return balance_by_time(profile(model, sample, options), partitions, {.checkpoint = Checkpoint::kNever});
}

std::vector<std::int64_t> balance_by_size(int partitions, const Model& model, const Value& sample, int chunks,
                                          double param_scale, Checkpoint checkpoint) {
  check_stages(partitions, static_cast<int>(model.named_layers().size()));
  const auto sizes = micro_batch_sizes(batch_size(sample), chunks, /*split_size=*/0);
  // The bytes that operators allocate depend on their number of threads, so measure with the number of a stage.
  const int threads = std::max(1, at::get_num_threads() / partitions);
  const auto options = ProfileOptions().param_scale(param_scale).seconds(0).repeats(1).intraop_threads(threads);
  return balance_by_size(profile(model, first_micro_batch(sample, sizes), options), partitions,
                         {.chunks = static_cast<int>(sizes.size()), .checkpoint = checkpoint});
}

}  // namespace gpipe
