#include "examples/common/plan.h"

#include <torch/cuda.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <iostream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "balance/balance.h"
#include "balance/cut.h"
#include "balance/plan_model.h"
#include "balance/profiler.h"
#include "balance/report.h"
#include "gpipe/action.h"
#include "gpipe/options.h"
#include "gpipe/schedule_source.h"

namespace gpipe::examples {
namespace {

int count_workers(const PipelineOptions& options) {
  if (options.schedule == kAnySchedule) return options.stages;
  const auto placement = schedule_source(options.schedule, options.stages, /*stages_per_worker=*/1).placement;
  return *std::max_element(placement.begin(), placement.end()) + 1;
}

torch::Device first_device(const PipelineOptions& options) {
  const torch::Device standard = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  return options.devices.empty() ? standard : torch::Device(options.devices.front());
}

// Measures on the first device. On the CPU, all workers at once.
Profile measure(const torch::nn::Sequential& model, const PipelineOptions& options, std::int64_t images,
                torch::IntArrayRef image_shape) {
  const auto device = first_device(options);
  auto shape = image_shape.vec();
  shape.insert(shape.begin(), std::max<std::int64_t>(2, images));  // batch norm can need two images
  const auto measuring = ProfileOptions().workers(device.is_cpu() ? count_workers(options) : 1).param_scale(4);  // Adam
  return profile(model, torch::full(shape, 0.5, device), measuring);
}

GPipeOptions pipe_options(const PipelineOptions& options) {
  std::vector<torch::Device> devices(options.devices.begin(), options.devices.end());
  if (devices.size() == 1) {
    const int workers = count_workers(options);
    const auto& ranks = options.ranks;
    const auto own = ranks ? std::ranges::count(ranks->mesh().ranks_of_workers(workers, 0), ranks->rank()) : workers;
    devices.resize(static_cast<std::size_t>(own), devices.front());
  }
  auto made = GPipeOptions().devices(devices).chunks(options.chunks).checkpoint(options.checkpoint);
  return made.schedule(options.schedule).ranks(options.ranks);
}

}  // namespace

void check_pipeline(const torch::nn::Sequential& model, const PipelineOptions& options) {
  const auto layers = static_cast<std::int64_t>(model->size());
  if (options.stages > layers) {
    throw std::invalid_argument(
        absl::StrCat("--stages is ", options.stages, ", but the model has ", layers, " layers"));
  }
  if (options.ranks) {
    const int workers = count_workers(options), processes = options.ranks->size();
    if (workers >= processes) return;
    throw std::invalid_argument(absl::StrCat("the pipeline has ", workers, " workers, but there are ", processes,
                                             " processes; give each at least one, with more --stages"));
  }
  if (!options.layers.empty()) {
    GPipe(model, options.layers, pipe_options(options));
    return;
  }
  torch::nn::Sequential stand_in;
  for (int stage = 0; stage < options.stages; ++stage) stand_in->push_back(torch::nn::Identity());
  GPipe(stand_in, std::vector<std::int64_t>(options.stages, 1), pipe_options(options));
}

Planned plan_training(const torch::nn::Sequential& model, const PipelineOptions& options,
                      torch::IntArrayRef image_shape) {
  const auto sizes = micro_batch_sizes(options.batch_size, options.chunks, /*split_size=*/0);
  RunOptions run{.chunks = static_cast<int>(sizes.size()),
                 .checkpoint = options.checkpoint,
                 .scheduling = {.schedule = options.schedule}};
  Profile profile;
  auto balance = options.layers;
  if (is_first(options.ranks)) {
    profile = measure(model, options, sizes.front(), image_shape);
    if (balance.empty()) balance = balance_by_time(profile, options.stages, run);
  }
  if (options.ranks) {
    const auto shared = options.ranks->share(absl::StrJoin(balance, ","));
    balance.clear();
    for (const auto part : absl::StrSplit(shared, ',')) balance.push_back(std::stoll(std::string(part)));
  }
  auto made = pipe_options(options);
  made.deferred_batch_norm(true);
  const GPipe pipe(model, balance, made);
  if (!is_first(options.ranks)) return {pipe};
  std::cout << "plan: balance " << balance_to_text(balance) << ", " << run.chunks << " micro-batches, checkpoint "
            << to_string(options.checkpoint) << ", schedule " << options.schedule << std::endl;
  if (sizes.front() < 2 || options.schedule == kAnySchedule) return {pipe};
  run.copies = copies_between(pipe->devices());
  const auto prediction = predict(profile, balance, run);
  std::cout << "predicted:\n" << prediction_table(prediction) << std::flush;
  return {pipe, prediction};
}

GPipe cut_by_time(const torch::nn::Sequential& model, const PipelineOptions& options, const Value& sample) {
  auto balance = options.layers;
  if (options.stages == 1) balance = {static_cast<std::int64_t>(model->size())};
  if (balance.empty()) {
    auto tensors = sample.tensors();
    for (auto& tensor : tensors) tensor = tensor.to(first_device(options));
    balance = balance_by_time(options.stages, model, Value(sample.form(), std::move(tensors)));
  }
  return GPipe(model, balance, pipe_options(options));
}

}  // namespace gpipe::examples
