#include "examples/common/training_options.h"

#include <CLI/CLI.hpp>
#include <limits>
#include <string>

#include "examples/common/flags.h"

namespace gpipe::examples {

void add_training_options(CLI::App& app, TrainingOptions& options) {
  add_pipeline_options(app, options);
  app.add_option("-o,--output", options.output, "directory for what the run writes")->transform(path_name());
  app.add_flag("--overwrite", options.overwrite, "replace an earlier training in --output; without it that is refused");
  app.add_option("-e,--epochs", options.epochs, "passes over the training images")->transform(whole_number(1, 1000000));
  app.add_option("-l,--learning-rate", options.learning_rate, "of Adam, at the start")->transform(positive_number());
  app.add_option("--schedule", options.schedule,
                 "of the learning rate, by epoch: cosine, falling towards 0 after the last; plateau, a tenth whenever "
                 "the validation score has not risen for 5")
      ->check(CLI::IsMember({"cosine", "plateau"}));
  app.add_option("--clip", options.clip, "largest norm of the gradient; 0 for any")->transform(non_negative_number());
  app.add_flag("--amp", options.amp, "compute in bfloat16 where that is safe (autocast)");
  app.add_option("--seed", options.seed, "of weights, order and what is drawn")
      ->transform(whole_number(0, std::numeric_limits<std::uint64_t>::max()));
  app.add_option("--resume", options.resume, "snapshot to go on from, as if it had never stopped; --epochs may be more")
      ->transform(path_name())
      ->always_capture_default(false);
  app.add_option("-f,--load", options.load, "snapshot to take the weights of, when there is none to resume")
      ->transform(path_name())
      ->always_capture_default(false);

  app.add_option_function<std::string>(
         "--checkpoint", [&options](const std::string& mode) { options.checkpoint = checkpoints().at(mode); },
         "micro-batches that recompute instead of storing: never, except_last, always")
      ->default_str(to_string(options.checkpoint))
      ->check(CLI::IsMember(checkpoints()))
      ->group(kPipelineGroup);
  app.add_option("--trace", options.trace, "write the timeline of one training step, for ui.perfetto.dev")
      ->transform(path_name())
      ->always_capture_default(false)
      ->group(kPipelineGroup);
}

}  // namespace gpipe::examples
