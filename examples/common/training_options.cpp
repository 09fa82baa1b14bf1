#include "examples/common/training_options.h"

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <iostream>

namespace gpipe::examples {
namespace {

std::vector<std::int64_t> to_counts(const std::string& text) {
  std::vector<std::int64_t> counts;
  for (const auto& part : CLI::detail::split(text, ',')) {
    std::int64_t count = 0;
    if (!CLI::detail::lexical_cast(part, count) || count < 1) {
      throw CLI::ValidationError("--balance", "'" + part + "' is no number of layers; give them as 20,35");
    }
    counts.push_back(count);
  }
  return counts;
}

std::vector<torch::Device> to_devices(const std::string& text) {
  std::vector<torch::Device> devices;
  for (const auto& part : CLI::detail::split(text, ',')) {
    try {
      devices.emplace_back(part);
    } catch (const std::exception&) {
      throw CLI::ValidationError("--devices", "'" + part + "' is no device; give cpu, cuda or cuda:N");
    }
  }
  return devices;
}

}  // namespace

void add_training_options(CLI::App& app, TrainingOptions& options) {
  // A flag given twice: the last one counts, so that a script's own can be overridden.
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(34);

  app.add_option("-o,--output", options.output, "directory for what the run writes");
  app.add_option("-e,--epochs", options.epochs, "passes over the training images")->check(CLI::Range(1, 1000000));
  app.add_option("-b,--batch-size", options.batch_size, "images in a mini-batch")->check(CLI::PositiveNumber);
  app.add_option("-l,--learning-rate", options.learning_rate, "of Adam, at the start")->check(CLI::PositiveNumber);
  app.add_option("--schedule", options.schedule,
                 "of the learning rate: cosine, down to 0 at the last epoch; plateau, a tenth whenever the validation "
                 "score has not risen for 5 epochs")
      ->check(CLI::IsMember({"cosine", "plateau"}));
  app.add_option("--clip", options.clip, "largest norm of the gradient; 0 for any")->check(CLI::NonNegativeNumber);
  app.add_option("--seed", options.seed, "of weights, order and what is drawn");
  app.add_option("--workers", options.workers, "threads that decode ahead of training")->check(CLI::Range(1, 256));
  auto* resume = app.add_option("--resume", options.resume, "snapshot to go on from, as if it had never stopped")
                     ->always_capture_default(false);
  app.add_option("-f,--load", options.load, "snapshot to take the weights of")
      ->always_capture_default(false)
      ->excludes(resume);

  const std::string pipeline = "Pipeline";
  app.add_option("--stages", options.stages, "parts that the model is cut into, one a device")
      ->check(CLI::Range(1, 1024))
      ->group(pipeline);
  app.add_option("--balance", "layers in each stage, as 20,35; without it the cut is measured")->group(pipeline);
  app.add_option("--chunks", options.chunks, "micro-batches in a mini-batch")
      ->check(CLI::PositiveNumber)
      ->group(pipeline);
  const std::map<std::string, Checkpoint> modes = {
      {"never", Checkpoint::kNever}, {"except_last", Checkpoint::kExceptLast}, {"always", Checkpoint::kAlways}};
  app.add_option_function<std::string>(
         "--checkpoint", [&options, modes](const std::string& mode) { options.checkpoint = modes.at(mode); },
         "micro-batches that recompute instead of storing: never, except_last, always")
      ->default_str("except_last")
      ->check(CLI::IsMember(modes))
      ->group(pipeline);
  app.add_option("--devices", "one a stage, as cuda:0,cuda:1, or one for all; without it the GPUs, or the CPU")
      ->group(pipeline);
  app.add_option("--trace", options.trace, "write the timeline of one training step, for ui.perfetto.dev")
      ->always_capture_default(false)
      ->group(pipeline);

  app.final_callback([&app, &options] {
    if (app.count("--balance") > 0) {
      options.balance = to_counts(app["--balance"]->as<std::string>());
      const auto cuts = static_cast<int>(options.balance.size());
      if (app.count("--stages") > 0 && options.stages != cuts) {
        throw CLI::ValidationError("--balance", "has " + std::to_string(cuts) + " stages, but --stages is " +
                                                    std::to_string(options.stages) + "; give one of them");
      }
      options.stages = cuts;
    }
    if (app.count("--devices") > 0) {
      options.devices = to_devices(app["--devices"]->as<std::string>());
      if (options.devices.size() == 1) options.devices.resize(options.stages, options.devices.front());
      if (static_cast<int>(options.devices.size()) != options.stages) {
        throw CLI::ValidationError("--devices", "has " + std::to_string(options.devices.size()) + " for " +
                                                    std::to_string(options.stages) +
                                                    " stages; give one a stage, or one for all");
      }
    }
  });
}

int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& run) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  try {
    return run();
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  return 1;
}

}  // namespace gpipe::examples
