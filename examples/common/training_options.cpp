#include "examples/common/training_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <limits>
#include <string>

#include "examples/common/flags.h"
#include "gpipe/schedules.h"

namespace gpipe::examples {
namespace {

// The name of a schedule, or @FILE.
CLI::Validator schedule_text() {
  return {[](std::string& text) -> std::string {
            const auto rules = schedule_rules();
            const bool known =
                std::any_of(rules.begin(), rules.end(), [&](const auto& rule) { return rule.name == text; });
            if (known || text == kAuto || text.starts_with('@')) return "";
            return "must be auto, @FILE or one of " + schedule_names() + ", but is '" + text + "'";
          },
          ""};
}

}  // namespace

void add_training_options(CLI::App& app, TrainingOptions& options) {
  add_pipeline_options(app, options);
  app.add_option("-o,--output", options.output, "folder for the output files")->transform(path_name());
  app.add_flag("--overwrite", options.overwrite, "replace an earlier training in --output; otherwise it is refused");
  app.add_option("-e,--epochs", options.epochs, "passes over the training images")->transform(whole_number(1, 1000000));
  app.add_option("-l,--learning-rate", options.learning_rate, "learning rate of Adam at the start")
      ->transform(positive_number());
  app.add_option("--learning-rate-schedule", options.learning_rate_schedule,
                 "learning rate by epoch: cosine falls towards 0 after the last epoch; plateau divides by 10 whenever "
                 "the validation score has not risen for 5 epochs")
      ->check(CLI::IsMember({"cosine", "plateau"}));
  app.add_option("--clip", options.clip, "largest norm of the gradient; 0 for no limit")
      ->transform(non_negative_number());
  app.add_flag("--amp", options.amp, "compute in bfloat16 where that is safe (autocast)");
  app.add_option("--seed", options.seed, "seed of weights, order and drawn data")
      ->transform(whole_number(0, std::numeric_limits<std::uint64_t>::max()));
  app.add_option(
         "--resume", options.resume,
         "snapshot to continue from, as if the run had never stopped; --epochs can be higher. auto: the latest one "
         "in --output, or a new training if there is none")
      ->transform(path_name())
      ->always_capture_default(false);
  app.add_option("--snapshot-every", options.snapshot_every,
                 "write latest.snapshot also after every so many steps of an epoch; 0: only after each epoch")
      ->transform(whole_number(0, kMaxCount));
  app.add_option("-f,--load", options.load, "snapshot to take the weights from; ignored if the run resumes")
      ->transform(path_name())
      ->always_capture_default(false);

  app.add_option(
         "--schedule", options.schedule,
         "order of forwards and backwards on each worker: " + schedule_names() +
             "; @FILE, with one line of actions per worker (see python -m gpipe print); or auto, with --balance auto, "
             "for the fastest on --stages workers")
      ->transform(schedule_text())
      ->group(kPipelineGroup);
  app.add_option("--stages-per-worker", options.stages_per_worker,
                 "number of stages on each worker; with p workers, stage s is on worker s mod p, and --devices has p")
      ->transform(whole_number(1, 1024))
      ->group(kPipelineGroup);
  app.add_option(
         "--replicas", options.replicas,
         "number of equal pipelines, over processes that torchrun starts; each trains on its part of a mini-batch, "
         "of --chunks micro-batches, and their gradients are summed")
      ->transform(whole_number(1, 1 << 20))
      ->group(kPipelineGroup);
  app.add_option_function<std::string>(
         "--checkpoint", [&options](const std::string& mode) { options.checkpoint = checkpoints().at(mode); },
         "which micro-batches recompute their activations instead of storing them: never, except_last, always")
      ->default_str(to_string(options.checkpoint))
      ->check(CLI::IsMember(checkpoints()))
      ->group(kPipelineGroup);
  app.add_option("--trace", options.trace, "file for the timeline of one training step, for ui.perfetto.dev")
      ->transform(path_name())
      ->always_capture_default(false)
      ->group(kPipelineGroup);
  app.add_flag("--profile", options.profile, "print the measured costs of each layer, and all plans that were compared")
      ->group(kPipelineGroup);
}

}  // namespace gpipe::examples
