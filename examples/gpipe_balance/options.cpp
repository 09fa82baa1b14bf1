#include "examples/gpipe_balance/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "balance/suggest.h"
#include "examples/common/flags.h"
#include "examples/common/image.h"
#include "examples/common/pipeline_options.h"
#include "examples/common/plan.h"
#include "examples/gpipe_balance/model.h"
#include "gpipe/memory_reuse.h"
#include "gpipe/run/micro_batch.h"
#include "gpipe/schedule/schedule_source.h"
#include "gpipe/schedules.h"

namespace gpipe::examples::balance {

namespace {

/// A number of bytes, with a unit.
CLI::Validator size_text() {
  return {[as_bytes = CLI::AsSizeValue(/*kb_is_1000=*/true)](std::string& text) {
            const auto given = text;
            try {
              if (!given.starts_with('-') && as_bytes(text).empty()) return std::string();
            } catch (const CLI::ValidationError&) {  // for a number that is too large
            }
            return "must be a size such as 6GB or 6GiB, but is '" + given + "'";
          },
          ""};
}

/// The name of a schedule. With `any`, it can be kAnySchedule.
CLI::Validator schedule_text(bool any) {
  return {[any](const std::string& name) {
            const bool known = name == kForward || (any && name == kAnySchedule) || name.starts_with('@');
            if (!known) schedule_rule(name);
            return "";
          },
          ""};
}

std::string help_of_schedules(bool any) {
  return absl::StrCat("of step(): ", schedule_names(), " or @FILE; ", kForward, ": a forward, then its backward",
                      any ? "; auto: try all that fit --stages workers" : "");
}

void add_stages_per_worker_flag(CLI::App& app, Options& options) {
  app.add_option("--stages-per-worker", options.stages_per_worker, "stages on each worker, in turn")
      ->transform(whole_number(1, 1024));
}

}  // namespace

std::vector<std::int64_t> Options::sizes(int chunks) const { return micro_batch_sizes(batch_size, chunks, 0); }

std::vector<torch::Device> Options::place() const {
  const auto placement = scheduling().placement;
  const int workers = placement.empty() ? stages : *std::max_element(placement.begin(), placement.end()) + 1;
  return devices.empty() ? examples::place({.stages = workers})
                         : to_devices(devices, workers, workers == stages ? "stage" : "worker");
}

Scheduling Options::scheduling() const {
  if (schedule == kAnySchedule) return {.schedule = schedule, .stages_per_worker = stages_per_worker};
  const bool steps = schedule != kForward;
  const auto name = steps ? schedule : kFillAndDrain;
  return {.schedule = steps ? schedule : "", .placement = schedule_source(name, stages, stages_per_worker).placement};
}

SearchOptions Options::search() const {
  const auto workers = place();
  SearchOptions search{
      .stages = stages, .memory_limit = memory, .network = network(), .copies = copies_between(workers)};
  for (const auto& device : workers) {
    search.devices.push_back(device.is_cpu() ? std::to_string(search.devices.size()) : device.str());
  }
  return search;
}

RunOptions Options::run(int chunks, Checkpoint mode) const {
  return {static_cast<int>(sizes(chunks).size()), mode, network(), copies_between(place()), scheduling()};
}

Network Options::network() const { return {.inside = {.bandwidth = bandwidth * 1e9}}; }

ProfileOptions Options::profiling() const { return profile_options(place()).seconds(seconds).param_scale(param_scale); }

void add_common_flags(CLI::App& app, Options& options) {
  app.add_option("--model", options.model, "unet, resnet18, resnet34, resnet50, resnet101 or resnet152")
      ->check(CLI::IsMember(model_names()));
  app.add_option("--channels", options.channels, "channels of the U-Net at full resolution")
      ->transform(whole_number(1, 4096));
  app.add_option("--size", options.size, "width and height of the images, in pixels")->transform(image_size_text());
  app.add_option("-b,--batch-size", options.batch_size, "images per mini-batch")->transform(whole_number(1, kMaxCount));
  app.add_option("--stages", options.stages, "number of stages")->transform(whole_number(1, 1024));
  app.add_option("--devices", options.devices,
                 "one per worker, e.g. cuda:0,cuda:1, or one for all; default: the GPUs in turn, or the CPU")
      ->always_capture_default(false);
  app.add_option("--seconds", options.seconds, "approximate time for measuring, in seconds")
      ->transform(non_negative_number());
  app.add_option("--param-scale", options.param_scale,
                 "bytes per byte of a parameter: itself, its gradient, and the optimizer's state; SGD 2, Adam 4")
      ->transform(number_between(2, 100));
  app.add_flag_callback(
      "--reuse-memory", [] { reuse_cpu_memory(); }, "keep freed memory of CPU tensors for reuse");
  app.add_flag("--json", options.json, "print JSON");
}

void add_chunks_flag(CLI::App& app, Options& options) {
  app.add_option("--chunks", options.chunks, "micro-batches per mini-batch")->transform(whole_number(1, kMaxCount));
}

void add_chunks_list(CLI::App& app, Options& options, const std::string& by_default) {
  app.add_option("--chunks", options.chunks_to_try, "numbers of micro-batches to try, e.g. 2,4; default: " + by_default)
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->transform(whole_number(1, kMaxCount))
      ->always_capture_default(false);
}

void add_bandwidth_flag(CLI::App& app, Options& options) {
  app.add_option("--bandwidth", options.bandwidth, "between devices, in GB/s; 0: transfers take no time")
      ->transform(non_negative_number());
}

void add_memory_limit_flag(CLI::App& app, Options& options) {
  app.add_option("--memory-limit", options.memory, "memory per device, e.g. 6GB or 6GiB; 0: no limit")
      ->transform(size_text());
}

void add_schedule_flags(CLI::App& app, Options& options, bool any) {
  // All verbs share the options, so a verb's own default is set when the verb is read.
  app.preparse_callback([&options, any](std::size_t) {
    if (any) options.schedule = kAnySchedule;
  });
  app.add_option("--schedule", options.schedule, help_of_schedules(any))
      ->check(schedule_text(any))
      ->default_str(any ? kAnySchedule : kForward);
  add_stages_per_worker_flag(app, options);
}

void add_schedule_list(CLI::App& app, Options& options) {
  app.add_option("--schedule", options.schedules_to_try,
                 help_of_schedules(/*any=*/true) + "; several names: of these schedules, all that fit --stages workers")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(schedule_text(/*any=*/true));
  add_stages_per_worker_flag(app, options);
}

void add_layers_flag(CLI::App& app, Options& options) {
  app.add_flag("--layers", options.layers, "also print the profile of each layer");
}

}  // namespace gpipe::examples::balance
