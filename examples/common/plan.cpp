#include "examples/common/plan.h"

#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <istream>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "absl/strings/str_format.h"
#include "balance/balance.h"
#include "balance/cut.h"
#include "balance/report.h"
#include "balance/suggest.h"
#include "examples/common/autocast.h"
#include "examples/common/percent.h"
#include "examples/common/processes.h"
#include "gpipe/assembly/workers.h"
#include "gpipe/run/micro_batch.h"

namespace gpipe::examples {
namespace {

// The time that profiling takes, in seconds.
constexpr double kSeconds = 5;
constexpr double kAutoSeconds = 40;

int count_cpus(const std::vector<torch::Device>& devices) {
  return static_cast<int>(
      std::count_if(devices.begin(), devices.end(), [](const auto& device) { return device.is_cpu(); }));
}

// Without the schedule if it is to be chosen.
GPipeOptions pipe_options(const PipelineOptions& options) {
  auto made = GPipeOptions().devices(place(options)).chunks(options.chunks);
  if (options.schedule != kAuto) made.schedule(options.schedule).stages_per_worker(options.stages_per_worker);
  return made;
}

// A pipeline with the options' stages, of one layer each.
GPipe stand_in(const PipelineOptions& options) {
  torch::nn::Sequential layers;
  for (int stage = 0; stage < options.stages; ++stage) layers->push_back(torch::nn::Identity());
  return GPipe(layers, std::vector<std::int64_t>(options.stages, 1), pipe_options(options));
}

int count_micro_batches(std::int64_t images, std::int64_t chunks) {
  return static_cast<int>(micro_batch_sizes(images, chunks, /*split_size=*/0).size());
}

// Checks that the schedule fits the parts of a mini-batch. Errors: std::invalid_argument.
void check_micro_batches(const PipelineOptions& options, std::int64_t images) {
  const auto pipe = stand_in(options);
  const int chunks = count_micro_batches(part_sizes(options.ranks, options.batch_size).front(), options.chunks);
  for (const auto part : part_sizes(options.ranks, images)) {
    pipe->program(count_micro_batches(part, chunks));
  }
}

torch::Tensor images(std::int64_t count, std::vector<std::int64_t> shape, torch::Device device) {
  shape.insert(shape.begin(), count);
  return torch::full(shape, 0.5, device);
}

}  // namespace

ProfileOptions profile_options(const std::vector<torch::Device>& devices) {
  return ProfileOptions().workers(devices.front().is_cpu() ? count_cpus(devices) : 1);
}

void check_pipeline(const torch::nn::Sequential& model, const PipelineOptions& options) {
  const auto layers = static_cast<std::int64_t>(model->size());
  if (options.stages > layers) {
    throw std::invalid_argument("--stages is " + std::to_string(options.stages) + ", but the model has " +
                                std::to_string(layers) + " layers");
  }
  if (options.ranks && worker_count(options) < options.ranks->mesh().positions) {
    throw std::invalid_argument("the pipeline has " + std::to_string(worker_count(options)) +
                                " workers, but there are " + std::to_string(options.ranks->mesh().positions) +
                                " processes" + (options.replicas > 1 ? " per replica" : "") +
                                "; give each at least one worker, with more --stages");
  }
  if (!options.layers.empty()) GPipe(model, options.layers, pipe_options(options));
  check_micro_batches(options, options.batch_size);
}

void check_last_mini_batch(const PipelineOptions& options, std::int64_t training_images) {
  const auto rest = training_images % options.batch_size;
  if (rest == 0) return;
  try {
    check_micro_batches(options, rest);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(absl::StrFormat("the last mini-batch of an epoch has %d of %d images: %s", rest,
                                                options.batch_size, error.what()));
  }
}

namespace {

Plan measure(const torch::nn::Sequential& model, const TrainingOptions& options,
             const std::vector<std::int64_t>& image_shape, bool terminal, std::ostream& out) {
  static_assert(std::string_view(kAuto) == kAnySchedule);
  Plan plan{.chunks = options.chunks, .checkpoint = options.checkpoint, .schedule = options.schedule};
  const auto devices = place(options);
  const auto device = devices.front();
  const Scheduling scheduling{.schedule = options.schedule, .stages_per_worker = options.stages_per_worker};
  const Autocast autocast(options.amp, {device});
  const auto part = part_sizes(options.ranks, options.batch_size).front();
  Percent percent(out, terminal, "measuring");
  auto profiling = profile_options(devices)
                       .param_scale(4)  // Adam
                       .progress([&](double part) { percent.show(part); });
  if (options.balance == kAuto) {
    const auto suggestion = suggest(model, images(part, image_shape, device), devices,
                                    SuggestOptions().scheduling(scheduling).profile(profiling.seconds(kAutoSeconds)));
    const auto& best = suggestion.best();
    plan.candidates = suggestion.candidates;
    plan.profile = suggestion.profile_of(best);
    plan.chunks = best.chunks;
    plan.checkpoint = best.checkpoint;
    plan.balance = best.balance;
    plan.schedule = best.schedule;
    if (options.schedule == kAuto) plan.placement = best.placement;
    plan.choice = absl::StrFormat("auto: the fastest of %d plans", plan.candidates.size());
    plan.prediction = predict(plan.profile, plan.balance,
                              {.chunks = best.chunks,
                               .checkpoint = best.checkpoint,
                               .copies = copies_between(devices),
                               .scheduling = {.schedule = best.schedule, .placement = best.placement}});
    return plan;
  }
  const auto sizes = micro_batch_sizes(part, plan.chunks, /*split_size=*/0);
  // Batch norm can need two images.
  const auto samples = std::max<std::int64_t>(2, sizes.front());
  plan.profile = profile(model, images(samples, image_shape, device), profiling.seconds(kSeconds));
  plan.chunks = static_cast<std::int64_t>(sizes.size());
  const RunOptions run{.chunks = static_cast<int>(plan.chunks),
                       .checkpoint = plan.checkpoint,
                       .copies = copies_between(devices),
                       .scheduling = scheduling};
  if (options.balance == kByTime) plan.balance = balance_by_time(plan.profile, options.stages, run);
  if (options.balance == kBySize) plan.balance = balance_by_size(plan.profile, options.stages, run);
  if (options.balance.empty()) plan.balance = options.layers;
  plan.choice = options.balance.empty() ? "as given" : options.balance;
  if (samples == sizes.front()) plan.prediction = predict(plan.profile, plan.balance, run);
  return plan;
}

// How to cut and run.
std::string to_text(const Plan& plan) {
  std::ostringstream text;
  for (const auto layers : plan.balance) text << layers << " ";
  text << "| ";
  for (const int worker : plan.placement) text << worker << " ";
  text << "| " << plan.chunks << " " << to_string(plan.checkpoint) << " " << plan.schedule;
  return text.str();
}

template <typename Number>
std::vector<Number> numbers_to_bar(std::istream& text) {
  std::vector<Number> numbers;
  std::string word;
  while (text >> word && word != "|") numbers.push_back(static_cast<Number>(std::stoll(word)));
  return numbers;
}

Plan to_plan(const std::string& text) {
  std::istringstream words(text);
  Plan plan;
  plan.balance = numbers_to_bar<std::int64_t>(words);
  plan.placement = numbers_to_bar<int>(words);
  std::string checkpoint;
  words >> plan.chunks >> checkpoint >> std::ws;
  plan.checkpoint = checkpoints().at(checkpoint);
  std::getline(words, plan.schedule);
  return plan;
}

}  // namespace

Plan make_plan(const torch::nn::Sequential& model, const TrainingOptions& options,
               const std::vector<std::int64_t>& image_shape, bool terminal, std::ostream& out) {
  if (!is_first(options.ranks)) return to_plan(options.ranks->share(""));
  auto plan = measure(model, options, image_shape, terminal, out);
  if (options.ranks) options.ranks->share(to_text(plan));
  return plan;
}

GPipe make_inference_pipe(const torch::nn::Sequential& model, const PipelineOptions& options,
                          const std::vector<std::int64_t>& image_shape) {
  auto balance = options.layers;
  if (options.stages == 1) balance = {static_cast<std::int64_t>(model->size())};
  if (balance.empty()) {
    check_pipeline(model, options);
    const auto devices = place(options);
    const auto samples = micro_batch_sizes(options.batch_size, options.chunks, /*split_size=*/0).front();
    const auto sample = images(std::max<std::int64_t>(2, samples), image_shape, devices.front());
    const auto of_model = profile(model, sample, profile_options(devices).seconds(kSeconds));
    std::vector<double> costs;
    for (const auto& layer : of_model.layers) {
      costs.push_back(options.balance == kBySize ? static_cast<double>(layer.parameters + layer.buffers)
                                                 : layer.stored);
    }
    balance = best_partition(costs, options.stages);
  }
  return GPipe(model, balance, pipe_options(options));
}

namespace {

// Those of this rank's workers; empty if none were given.
std::vector<torch::Device> own_devices(const PipelineOptions& options) {
  const auto ranks = ranks_of_workers(worker_count(options), *options.ranks);
  std::vector<torch::Device> own;
  for (std::size_t w = 0; w < options.devices.size(); ++w) {
    if (ranks[w] == options.ranks->rank()) own.push_back(options.devices[w]);
  }
  return own;
}

}  // namespace

GPipe make_pipe(const torch::nn::Sequential& model, const Plan& plan, const PipelineOptions& options) {
  auto made = pipe_options(options).chunks(plan.chunks).checkpoint(plan.checkpoint).ranks(options.ranks);
  made.deferred_batch_norm(true);  // so that scores depend neither on the replicas nor on the first one's images
  if (options.ranks) made.devices(own_devices(options));
  if (!plan.placement.empty()) made.schedule(plan.schedule).placement(plan.placement);
  return GPipe(model, plan.balance, made);
}

void print_plan(std::ostream& out, const std::string& name, const torch::nn::Sequential& model, const GPipe& pipe,
                const Plan& plan, bool details) {
  if (details) {
    out << "costs of each layer:\n" << profile_table(plan.profile, plan.balance);
    if (!plan.candidates.empty()) out << "plans compared, as predicted:\n" << candidate_table(plan.candidates);
  }
  out << "plan: balance " << balance_to_text(plan.balance) << " (" << plan.choice << "), " << plan.chunks
      << " micro-batches, checkpoint " << to_string(plan.checkpoint) << ", schedule " << plan.schedule << "\n";
  print_stages(out, name, *model, pipe, plan.prediction);
  if (plan.prediction) {
    out << absl::StrFormat("predicted step: %s, bubble %.0f %%", seconds_to_text(plan.prediction->seconds),
                           100 * plan.prediction->bubble);
  } else {
    out << "no prediction: a micro-batch has a single image";
  }
  out << std::endl;
}

}  // namespace gpipe::examples
