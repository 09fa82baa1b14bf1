#include "examples/common/plan.h"

#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "balance/balance.h"
#include "balance/cut.h"
#include "balance/report.h"
#include "balance/suggest.h"
#include "examples/common/processes.h"
#include "examples/common/progress.h"
#include "gpipe/options.h"

namespace gpipe::examples {
namespace {

/// How to cut and run a model.
struct Plan {
  Profile profile;
  std::vector<std::int64_t> balance;
  RunOptions run;
  bool measured = true;  // false for micro-batches of a single image, which are measured as two
};

GPipeOptions pipe_options(const PipelineOptions& options) {
  auto made = GPipeOptions().devices(place(options)).chunks(options.chunks).checkpoint(options.checkpoint);
  if (options.schedule != kAuto) made.schedule(options.schedule).stages_per_worker(options.stages_per_worker);
  return made;
}

// Measures on the first device. On the CPU, all its workers at once.
ProfileOptions profile_options(const std::vector<torch::Device>& devices, double seconds) {
  const auto cpus = std::count(devices.begin(), devices.end(), torch::Device(torch::kCPU));
  return ProfileOptions()
      .workers(devices.front().is_cpu() ? static_cast<int>(cpus) : 1)
      .seconds(seconds)
      .param_scale(4)  // Adam
      .progress([](double part) { show_percent("measuring", part); });
}

torch::Tensor images(std::int64_t count, std::vector<std::int64_t> shape, torch::Device device) {
  shape.insert(shape.begin(), count);
  return torch::full(shape, 0.5, device);
}

Plan make_plan(const torch::nn::Sequential& model, const TrainingOptions& options,
               const std::vector<std::int64_t>& image_shape) {
  const auto devices = place(options);
  const auto part = part_sizes(options.ranks, options.batch_size).front();
  Plan plan;
  plan.run.copies = copies_between(devices);
  plan.run.scheduling = {.schedule = options.schedule, .stages_per_worker = options.stages_per_worker};
  if (options.balance == kAuto) {
    const auto suggestion =
        suggest(model, images(part, image_shape, devices.front()), devices,
                SuggestOptions().scheduling(plan.run.scheduling).profile(profile_options(devices, 40)));
    const auto& best = suggestion.best();
    plan.profile = suggestion.profile_of(best);
    plan.balance = best.balance;
    plan.run.chunks = best.chunks;
    plan.run.checkpoint = best.checkpoint;
    plan.run.scheduling = {.schedule = best.schedule, .placement = best.placement};
    if (options.profile) std::cout << "plans compared:\n" << candidate_table(suggestion.candidates);
    std::cout << "auto: the fastest of " << suggestion.candidates.size() << " plans\n";
  } else {
    const auto sizes = micro_batch_sizes(part, options.chunks, /*split_size=*/0);
    plan.measured = sizes.front() > 1;  // batch norm can need two images
    const auto sample = images(std::max<std::int64_t>(2, sizes.front()), image_shape, devices.front());
    plan.profile = profile(model, sample, profile_options(devices, 5));
    plan.run.chunks = static_cast<int>(sizes.size());
    plan.run.checkpoint = options.checkpoint;
    plan.balance = options.layers;
    if (options.balance == "by-time") plan.balance = balance_by_time(plan.profile, options.stages, plan.run);
    if (options.balance == "by-size") plan.balance = balance_by_size(plan.profile, options.stages, plan.run);
  }
  show_percent("measuring", 1);
  if (options.profile) std::cout << "costs of each layer:\n" << profile_table(plan.profile, plan.balance);
  return plan;
}

// Gives all ranks the first one's plan, without its profile.
void share(Plan& plan, Ranks& ranks) {
  const nlohmann::json mine = {plan.balance, plan.run.chunks, to_string(plan.run.checkpoint),
                               plan.run.scheduling.schedule, plan.run.scheduling.placement};
  const auto shared = nlohmann::json::parse(ranks.share(mine.dump()));
  plan.balance = shared[0].get<std::vector<std::int64_t>>();
  plan.run.chunks = shared[1];
  plan.run.checkpoint = checkpoints().at(shared[2]);
  plan.run.scheduling.schedule = shared[3];
  plan.run.scheduling.placement = shared[4].get<std::vector<int>>();
}

// The devices of this rank's workers; empty if none were given.
std::vector<torch::Device> own_devices(const PipelineOptions& options) {
  std::vector<torch::Device> own;
  if (options.devices.empty()) return own;
  const auto devices = place(options);
  const auto ranks = options.ranks->mesh().ranks_of_workers(static_cast<int>(devices.size()), options.ranks->replica());
  for (std::size_t w = 0; w < devices.size(); ++w) {
    if (ranks[w] == options.ranks->rank()) own.push_back(devices[w]);
  }
  return own;
}

std::int64_t count_parameters(const torch::nn::Module& module) {
  std::int64_t count = 0;
  for (const auto& parameter : module.parameters()) count += parameter.numel();
  return count;
}

// `model` has the layers of all ranks.
void print_stages(const std::string& name, const torch::nn::Module& model, const GPipe& pipe) {
  const auto layers = model.children();
  std::cout << "model: " << name << ", " << layers.size() << " layers, " << count_parameters(model) << " parameters\n";
  auto layer = layers.begin();
  for (std::size_t s = 0; s < pipe->balance().size(); ++s) {
    std::int64_t parameters = 0;
    for (std::int64_t i = 0; i < pipe->balance()[s]; ++i) parameters += count_parameters(**layer++);
    const int worker = pipe->placement()[s];
    const bool here = pipe->is_here(static_cast<int>(s));
    std::cout << "stage " << s << ": " << pipe->balance()[s] << " layers, " << parameters << " parameters, on worker "
              << worker << ", " << (here ? pipe->devices()[worker].str() : "another rank") << "\n";
  }
  std::cout << std::flush;
}

}  // namespace

void check_pipeline(const torch::nn::Sequential& model, const PipelineOptions& options) {
  const auto layers = static_cast<std::int64_t>(model->size());
  if (options.stages > layers) {
    throw std::invalid_argument(
        absl::StrCat("--stages is ", options.stages, ", but the model has ", layers, " layers"));
  }
  if (options.ranks && worker_count(options) < options.ranks->mesh().positions) {
    throw std::invalid_argument(absl::StrCat("the pipeline has ", worker_count(options), " workers, but there are ",
                                             options.ranks->mesh().positions, " processes per pipeline",
                                             "; give each at least one worker, with more --stages"));
  }
  torch::nn::Sequential stand_in;
  for (int stage = 0; stage < options.stages; ++stage) stand_in->push_back(torch::nn::Identity());
  GPipe(stand_in, std::vector<std::int64_t>(options.stages, 1), pipe_options(options));
  if (!options.layers.empty()) GPipe(model, options.layers, pipe_options(options));
}

Planned plan_training(const torch::nn::Sequential& model, const std::string& name, TrainingOptions& options,
                      const std::vector<std::int64_t>& image_shape) {
  Plan plan;
  if (is_first(options.ranks)) plan = make_plan(model, options, image_shape);
  if (options.ranks) share(plan, *options.ranks);
  options.chunks = plan.run.chunks;
  options.checkpoint = plan.run.checkpoint;
  const auto& scheduling = plan.run.scheduling;
  auto made = pipe_options(options).ranks(options.ranks);
  made.deferred_batch_norm(true);  // so that scores depend neither on the replicas nor on the first one's images
  if (options.ranks) made.devices(own_devices(options));
  if (options.schedule == kAuto) made.schedule(scheduling.schedule).placement(scheduling.placement);
  const GPipe pipe(model, plan.balance, made);
  if (!is_first(options.ranks)) return {pipe, std::nullopt};
  std::cout << "plan: balance " << balance_to_text(plan.balance) << ", " << options.chunks
            << " micro-batches, checkpoint " << to_string(options.checkpoint) << ", schedule " << scheduling.schedule
            << "\n";
  print_stages(name, *model, pipe);
  if (!plan.measured) return {pipe, std::nullopt};
  const auto prediction = predict(plan.profile, plan.balance, plan.run);
  std::cout << "predicted:\n" << prediction_table(prediction) << std::flush;
  return {pipe, prediction};
}

GPipe plan_inference(const torch::nn::Sequential& model, const std::string& name, const PipelineOptions& options,
                     const std::vector<std::int64_t>& image_shape) {
  check_pipeline(model, options);
  auto balance = options.layers;
  if (options.stages == 1) balance = {static_cast<std::int64_t>(model->size())};
  if (balance.empty()) {
    const auto devices = place(options);
    const auto sample = images(std::max<std::int64_t>(2, options.batch_size), image_shape, devices.front());
    balance = balance_by_time(options.stages, model, sample, profile_options(devices, 5));
    show_percent("measuring", 1);
  }
  GPipe pipe(model, balance, pipe_options(options));
  print_stages(name, *model, pipe);
  return pipe;
}

}  // namespace gpipe::examples
