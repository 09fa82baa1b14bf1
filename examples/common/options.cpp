#include "examples/common/options.h"

#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <iostream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"

namespace gpipe::examples {
namespace {

constexpr char kPipelineGroup[] = "Pipeline";

// Moves --balance to `layers` if it lists them. They set --stages.
void read_layers(PipelineOptions& options, bool stages_are_given) {
  options.layers.clear();
  if (options.balance == kAuto || options.balance == "by-time" || options.balance == "by-size") return;
  for (const auto& part : CLI::detail::split(std::exchange(options.balance, ""), ',')) {
    if (absl::SimpleAtoi(part, &options.layers.emplace_back()) && options.layers.back() > 0) continue;
    throw CLI::ValidationError(
        "--balance", "must be auto, by-time, by-size or layers per stage such as 20,35, but has '" + part + "'");
  }
  const auto stages = static_cast<int>(options.layers.size());
  if (stages_are_given && stages != options.stages) {
    throw CLI::ValidationError("--balance", absl::StrCat("has ", stages, " stages, but --stages is ", options.stages));
  }
  options.stages = stages;
}

// Prints in one write, because ranks may share a terminal.
void print_error(const std::string& text) { std::cerr << absl::StrCat("error: ", text, "\n"); }

}  // namespace

CLI::Validator in_range(double low, double high) {
  return {[=](const std::string& text) -> std::string {
            double value = 0;
            const bool fits = absl::SimpleAtod(text, &value) && value >= low && value <= high;
            return fits ? "" : absl::StrCat("must be a number from ", low, " to ", high, ", but is '", text, "'");
          },
          ""};
}

void add_pipeline_options(CLI::App& app, PipelineOptions& options) {
  // The last of repeated flags counts, so that a script's own can be overridden.
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(34);
  app.add_option("-b,--batch-size", options.batch_size, "images per mini-batch")->check(in_range(1));

  app.option_defaults()->group(kPipelineGroup);
  auto* stages = app.add_option("--stages", options.stages, "number of stages that the model is cut into");
  stages->check(in_range(1, 1024));
  app.add_option(
      "--balance", options.balance,
      "how to cut: by-time or by-size, into stages of equal measured time or memory; auto, the fastest of all "
      "balances, chunks and checkpoint modes; or layers per stage, such as 20,35");
  app.add_option("--chunks", options.chunks, "micro-batches per mini-batch")->check(in_range(1));
  app.add_option("--devices", options.devices,
                 "one per worker, such as cuda:0,cuda:1, or one for all; by default the GPUs in turn, or the CPU")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->always_capture_default(false);
  app.option_defaults()->group("Options");
  app.final_callback([&options, stages] { read_layers(options, stages->count() > 0); });
}

void add_training_options(CLI::App& app, TrainingOptions& options) {
  add_pipeline_options(app, options);
  app.add_option("-o,--output", options.output, "folder for the output files");
  app.add_flag("--overwrite", options.overwrite, "replace an earlier training in --output; otherwise it is refused");
  app.add_option("-e,--epochs", options.epochs, "passes over the training images")->check(in_range(1));
  app.add_option("-l,--learning-rate", options.learning_rate, "learning rate of Adam at the start")
      ->check(in_range(1e-12, 1e3));
  app.add_option("--learning-rate-schedule", options.learning_rate_schedule,
                 "cosine: the learning rate falls towards 0 after the last epoch; or constant")
      ->check(CLI::IsMember({"cosine", "constant"}));
  app.add_option("--clip", options.clip, "largest norm of the gradient; 0 for no limit")->check(in_range(0, 1e30));
  app.add_flag("--amp", options.amp, "compute in bfloat16 where that is safe (autocast)");
  app.add_option("--seed", options.seed, "seed of weights, order and drawn data");
  app.add_option(
         "--resume", options.resume,
         "snapshot to continue from, as if the run had never stopped; --epochs can be higher. auto: the latest one "
         "in --output, or a new training if there is none")
      ->always_capture_default(false);
  app.add_option("--snapshot-every", options.snapshot_every,
                 "write latest.snapshot also after every so many steps of an epoch; 0: only after each epoch")
      ->check(in_range(0));
  app.add_option("-f,--load", options.load, "snapshot to take the weights from; ignored if the run resumes")
      ->always_capture_default(false);

  app.option_defaults()->group(kPipelineGroup);
  std::vector<std::string> names;
  for (const auto& rule : schedule_rules()) names.emplace_back(rule.name);
  app.add_option(
      "--schedule", options.schedule,
      "order of forwards and backwards on each worker: " + absl::StrJoin(names, ", ") +
          "; @FILE, with one line of actions per worker (see python -m gpipe draw); or auto, with --balance auto, "
          "for the fastest on --stages workers");
  app.add_option("--stages-per-worker", options.stages_per_worker,
                 "number of stages on each worker; with p workers, stage s is on worker s mod p, and --devices has p")
      ->check(in_range(1, 1024));
  app.add_option(
         "--replicas", options.replicas,
         "number of equal pipelines, over processes that torchrun starts; each trains on its part of a mini-batch, "
         "of --chunks micro-batches, and their gradients are summed")
      ->check(in_range(1));
  app.add_option("--checkpoint", options.checkpoint,
                 "which micro-batches recompute their activations instead of storing them: never, except_last, always")
      ->transform(CLI::CheckedTransformer(checkpoints()).description(""))
      ->default_str(to_string(options.checkpoint));
  app.add_option("--trace", options.trace, "file for the timeline of one training step, for ui.perfetto.dev")
      ->always_capture_default(false);
  app.add_flag("--profile", options.profile,
               "print the measured costs of each layer, and all plans that were compared");
  app.option_defaults()->group("Options");
}

int worker_count(const PipelineOptions& options) {
  if (options.schedule == kAuto) return options.stages;
  const auto placement = schedule_source(options.schedule, options.stages, options.stages_per_worker).placement;
  return *std::max_element(placement.begin(), placement.end()) + 1;
}

std::vector<torch::Device> place(const PipelineOptions& options) {
  const int workers = worker_count(options);
  std::vector<torch::Device> devices(options.devices.begin(), options.devices.end());
  if (devices.size() == 1) devices.resize(workers, devices.front());
  for (int w = 0; options.devices.empty() && w < workers; ++w) {
    const auto gpus = torch::cuda::device_count();
    devices.push_back(gpus == 0 ? torch::Device(torch::kCPU)
                                : torch::Device(torch::kCUDA, static_cast<torch::DeviceIndex>(w % gpus)));
  }
  if (static_cast<int>(devices.size()) == workers) return devices;
  throw std::invalid_argument(absl::StrCat("--devices must be one per worker, or one for all, but there are ",
                                           devices.size(), " for ", workers, " workers"));
}

int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& run) {
  std::signal(SIGXFSZ, SIG_IGN);  // so that writing too large a file is an error
  app.failure_message(
      [](const CLI::App*, const CLI::Error& error) { return absl::StrCat("error: ", error.what(), "\n"); });
  try {
    app.parse(argc, argv);
    const int code = run();
    if (std::cout.flush()) return code;
    print_error("cannot write to standard output");
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const c10::Error& error) {
    print_error(error.what_without_backtrace());
  } catch (const std::system_error& error) {
    const bool thread = error.code() == std::errc::resource_unavailable_try_again;
    print_error(absl::StrCat(thread ? "cannot start a thread: " : "", error.what()));
  } catch (const std::exception& error) {
    print_error(error.what());
  }
  return 1;
}

}  // namespace gpipe::examples
